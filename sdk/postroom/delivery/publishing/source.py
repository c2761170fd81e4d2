"""The tables that are published, events, deliveries and dead letters, as one kind of thing to publisher and record.

Their queries have the same names, parameters and results; what differs is how a row becomes a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import asyncpg
import msgspec

from postroom.chassis.postgres import Connection, Pool
from postroom.chassis.sql import Queries, load_queries
from postroom.delivery.dead_letters.letter import EVENT_TYPE, EVENT_TYPE_HEADER, RECORDED, DeadLetter
from postroom.delivery.history import history_message
from postroom.delivery.message import EPOCH, MESSAGE_ID

_encode: Final = msgspec.json.Encoder().encode


class Outgoing(NamedTuple):
    """A message that is to be published; `place` counts within its aggregate, from 1."""

    key: str
    aggregate: str | int
    place: int
    attempts: int
    subject: str
    body: bytes
    headers: dict[str, str]
    shorter: bytes | None = None  # the body where the server takes no message so large


class Place(NamedTuple):
    """Where the server put a message: a number in a stream that was created then, perhaps at an earlier publish."""

    stream: str
    created_at: datetime
    sequence: int
    duplicate: bool


class Backlog(msgspec.Struct, frozen=True):
    """How much waits to be published, since when, how much failed before (docs/contract/delivery.md#delivery-20)."""

    count: int
    oldest_at: datetime | None
    failing: int


@dataclass(frozen=True)
class Source:
    """One table. `lowest` sorts before every aggregate."""

    name: str
    queries: Queries
    lowest: str | int
    outgoing: Callable[[asyncpg.Record], Outgoing]

    async def claim_aggregates(self, connection: Connection, after: str | int, most: int) -> list[tuple[Any, bool]]:
        """Return the next due aggregates, and of each whether it is this transaction's now."""
        rows = await connection.fetch(self.queries["claim_aggregates"], after, most)
        return [(row["aggregate"], row["claimed"]) for row in rows]

    async def claim(
        self, connection: Connection, aggregates: Sequence[str | int], *, most: int, most_bytes: int
    ) -> list[Outgoing]:
        """Return the oldest messages of `aggregates`, oldest first."""
        rows = await connection.fetch(self.queries["claim"], aggregates, most, most_bytes)
        return [self.outgoing(row) for row in rows]

    async def mark_published(
        self, connection: Connection, placed: Sequence[tuple[Outgoing, Place]], horizon: timedelta
    ) -> list[str]:
        """Note where messages are; whatever had one of these numbers before is lost, and is published again.

        Return those that are published again themselves, since they or what had their number may be the lost ones.
        """
        if not placed:
            return []
        keys = [message.key for message, _ in placed]
        streams, created, sequences, _ = zip(*(place for _, place in placed), strict=True)
        rows = await connection.fetch(
            self.queries["mark_published"], keys, list(streams), list(created), list(sequences), horizon
        )
        return [row[0] for row in rows]

    async def requeue(self, connection: Connection, keys: Sequence[str]) -> None:
        """Make published messages unpublished again, under the next epoch."""
        if keys:
            await connection.execute(self.queries["requeue"], keys)

    async def requeue_unhandled(self, connection: Connection, keys: Sequence[str]) -> None:
        """Make those of the published messages unpublished again that nobody is known to have handled."""
        if keys:
            rows = await connection.fetch(self.queries["find_unhandled"], keys)
            await self.requeue(connection, [row[0] for row in rows])

    async def mark_failed(self, connection: Connection, failed: Sequence[tuple[Outgoing, str, float]]) -> None:
        """Count a failed attempt of each message: its error, and the seconds until the next."""
        if failed:
            messages, errors, seconds = zip(*failed, strict=True)
            keys = [message.key for message in messages]
            await connection.execute(self.queries["mark_failed"], keys, list(errors), list(seconds))

    async def backlog(self, connection: Connection | Pool, context: str | None = None) -> Backlog:
        """Ask for the backlog of one context, or of all."""
        row = await connection.fetchrow(self.queries["backlog"], context)
        assert row is not None  # noqa: S101 - aggregates without groups always have a row
        return Backlog(**row)


def message_id(identity: str, epoch: int) -> str:
    """Return the `Nats-Msg-Id`: fresh in each epoch, for a stream would swallow the old one; inboxes cut it off."""
    return f"{identity}/{epoch}" if epoch else identity


def identifying(identity: str, epoch: int) -> dict[str, str]:
    """Return the headers that say which message it is, and which part of its id is the epoch."""
    headers = {MESSAGE_ID: message_id(identity, epoch)}
    return {**headers, EPOCH: str(epoch)} if epoch else headers


def _event(row: asyncpg.Record) -> Outgoing:
    headers = {
        **identifying(row["id"], row["epoch"]),
        "Postroom-Event-Type": row["event_type"],
        "X-Event-Version": str(row["event_version"]),
        "X-Occurred-At": row["occurred_at"].isoformat(),
    }
    for name, column in (
        ("X-Correlation-Id", "correlation_id"),
        ("X-Causation-Id", "causation_id"),
        ("traceparent", "traceparent"),
    ):
        if row[column] is not None:
            headers[name] = str(row[column])
    return _outgoing(row, row["id"], row["body"].encode(), headers)


def _delivery(row: asyncpg.Record) -> Outgoing:
    headers = {**identifying(row["id"], row["epoch"]), "X-Occurred-At": row["accepted_at"].isoformat()}
    if row["traceparent"] is not None:
        headers["traceparent"] = row["traceparent"]
    key = f"{row['broker_message_id']}.{row['recipient_id']}"
    return _outgoing(row, key, _encode(history_message(row)), headers)


def _letter(row: asyncpg.Record) -> Outgoing:
    letter = msgspec.json.decode(row["letter"], type=DeadLetter)
    headers = {**identifying(row["letter_id"], row["epoch"]), EVENT_TYPE_HEADER: EVENT_TYPE, RECORDED: "postgres"}
    outgoing = _outgoing(row, str(row["aggregate"]), _encode(letter.with_data(row["payload"])), headers)
    return outgoing._replace(shorter=_encode(letter.shortened()))


def _outgoing(row: asyncpg.Record, key: str, body: bytes, headers: dict[str, str]) -> Outgoing:
    return Outgoing(key, row["aggregate"], row["place"], row["publish_attempts"], row["subject"], body, headers)


EVENTS: Final = Source("events", load_queries(__package__, "events.sql"), "", _event)
DELIVERIES: Final = Source("deliveries", load_queries(__package__, "deliveries.sql"), 0, _delivery)
LETTERS: Final = Source("letters", load_queries(__package__, "letters.sql"), 0, _letter)


async def sources_of(database: Connection | Pool) -> Sequence[Source]:
    """Return what there is to publish in a database: deliveries only where it is a broker's."""
    has_broker = await database.fetchval(DELIVERIES.queries["has_broker"])
    return (EVENTS, DELIVERIES, LETTERS) if has_broker else (EVENTS, LETTERS)
