"""Making published rows unpublished again, under the next epoch; the publisher does the rest."""

from __future__ import annotations

from typing import Any, Final

import asyncpg

from postroom.chassis.postgres import Connection
from postroom.chassis.sql import load_queries
from postroom.delivery.publishing.source import Source

_QUERIES: Final = load_queries(__package__, "record.sql")
_STEP: Final = 5000  # rows of one statement


async def requeue_all(connection: Connection, source: Source, find: str, bounds: tuple[Any, ...]) -> int:
    """Requeue what `find` finds, step by step: what is requeued, or published again since, is not found again."""
    requeued = 0
    while keys := [row[0] for row in await connection.fetch(find, *bounds, _STEP)]:
        await source.requeue(connection, keys)
        requeued += len(keys)
    return requeued


async def all_marked(connection: Connection) -> bool:
    """Wait until what has been published by now is marked so; False where a publisher takes too long over that.

    Then a search may miss what that publisher has under way, and is to be made again.
    """
    try:
        async with connection.transaction():
            await connection.execute(_QUERIES["wait_briefly"])
            await connection.execute(_QUERIES["await_marks"])
    except asyncpg.LockNotAvailableError:
        return False
    return True
