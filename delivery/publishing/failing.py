"""Events that JetStream refuses: an operator sees which, and what waits behind each, and can take one out for good.

What no stream takes, or is too large, holds up its aggregate until somebody mends the cause, and then goes by itself.
What can never go is dropped: it leaves the outbox and is kept, whole, beside who dropped it and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec

from chassis.postgres import Connection
from chassis.sql import load_queries
from delivery.errors import event_not_failing

_QUERIES: Final = load_queries(__package__, "failing.sql")
LIMIT: Final = 1000  # events that are listed


class FailingEvent(msgspec.Struct, frozen=True):
    """An unpublished event whose last attempt failed; `behind` events of its aggregate wait for it."""

    id: str
    subject: str
    aggregate: str
    attempts: int
    error: str
    occurred_at: datetime
    next_attempt_at: datetime
    behind: int


class DroppedEvent(msgspec.Struct, frozen=True):
    """An event that an operator took out of the outbox."""

    id: str
    subject: str
    aggregate: str
    error: str
    dropped_at: datetime
    dropped_by: str
    reason: str


async def list_failing(connection: Connection, context: str | None = None) -> list[FailingEvent]:
    """Return the oldest events that are refused, of one context or of all."""
    return [FailingEvent(**row) for row in await connection.fetch(_QUERIES["list_failing"], context, LIMIT)]


async def drop_failing(connection: Connection, ids: Sequence[str], *, actor: str, reason: str) -> None:
    """Drop the events; raises `NotFound`, and drops none, where one of them is not refused."""
    wanted = [_identity(text) for text in ids]
    async with connection.transaction():
        rows = await connection.fetch(_QUERIES["drop"], wanted, actor, reason)
        dropped = {row["id"] for row in rows}
        for identity in wanted:
            if str(identity) not in dropped:
                raise event_not_failing(str(identity))


async def list_dropped(connection: Connection) -> list[DroppedEvent]:
    """Return what was dropped last, oldest first."""
    return [DroppedEvent(**row) for row in await connection.fetch(_QUERIES["list_dropped"], LIMIT)]


def _identity(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise event_not_failing(text) from None
