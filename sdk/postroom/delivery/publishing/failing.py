"""What JetStream refuses: an operator sees which events and deliveries, and what waits behind each, and can drop one.

What no stream takes, or is too large, holds up its aggregate (of deliveries: its recipient) until somebody mends the
cause, and then goes by itself. What can never go is dropped: an event leaves the outbox and is kept whole, a delivery
is noted, and its message stays in the history; who dropped it, and why, stands beside it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Final

import msgspec

from postroom.chassis.postgres import Connection
from postroom.chassis.sql import load_queries
from postroom.delivery.errors import not_failing
from postroom.delivery.publishing.source import DELIVERIES, EVENTS, Source

_QUERIES: Final = load_queries(__package__, "failing.sql")
LIMIT: Final = 1000  # that are listed
_UUID: Final = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_ID: Final = {EVENTS.name: re.compile(_UUID), DELIVERIES.name: re.compile(_UUID + r"\.[0-9]{1,9}")}


class Failing(msgspec.Struct, frozen=True):
    """An event or a delivery whose last attempt failed; `behind` others of its aggregate wait for it."""

    id: str
    subject: str
    aggregate: str
    attempts: int
    error: str
    occurred_at: datetime
    next_attempt_at: datetime
    behind: int


class Dropped(msgspec.Struct, frozen=True):
    """An event or a delivery that an operator took out for good."""

    id: str
    subject: str
    aggregate: str
    error: str
    dropped_at: datetime
    dropped_by: str
    reason: str


async def list_failing(connection: Connection, source: Source, context: str | None = None) -> list[Failing]:
    """Return the oldest of a source that are refused, of one context or of all."""
    rows = await connection.fetch(_QUERIES[f"list_{source.name}"], context, LIMIT)
    return [Failing(**row) for row in rows]


async def drop_failing(connection: Connection, source: Source, ids: Sequence[str], *, actor: str, reason: str) -> None:
    """Drop them; raises `NotFound`, and drops none, where one is not refused."""
    for text in ids:
        if _ID[source.name].fullmatch(text) is None:
            raise not_failing(source.name, text)
    async with connection.transaction():
        rows = await connection.fetch(_QUERIES[f"drop_{source.name}"], ids, actor, reason)
        dropped = {row["id"] for row in rows}
        for text in ids:
            if text not in dropped:
                raise not_failing(source.name, text)


async def list_dropped(connection: Connection, source: Source) -> list[Dropped]:
    """Return what was dropped last, oldest first."""
    return [Dropped(**row) for row in await connection.fetch(_QUERIES[f"list_dropped_{source.name}"], LIMIT)]
