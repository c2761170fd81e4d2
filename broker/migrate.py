"""Migrating the broker's database: delivering's tables first, whose outbox an accept and the steps of jobs write to."""

from __future__ import annotations

from typing import Final

from postroom.chassis import postgres

ROOMS: Final = ("postroom.delivery", "broker", "postroom.ledger")


async def migrate(url: str) -> list[str]:
    """Bring the database to this program's version and return the names of what was applied, in order.

    Raises `Fatal` as `postroom.chassis.postgres.migrate` does.
    """
    return await postgres.migrate(url, *ROOMS)
