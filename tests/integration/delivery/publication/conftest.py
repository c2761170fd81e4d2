"""Publishers for tests: on a database that has nothing but delivering's tables, with streams of their own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count
from operator import not_
from random import Random
from typing import Any

import nats
import pytest
from nats.js import JetStreamContext
from support.waiting import until_so

from postroom._wire.dead_letters import DeadLetter
from postroom.chassis.postgres import Pool, migrate, open_rooms
from postroom.delivery import ROOM
from postroom.delivery.dead_letters import RecordedLetters
from postroom.delivery.publication.link import Link
from postroom.delivery.publication.postgres import EVENTS, PostgresSource, Table
from postroom.delivery.publication.publisher import Publisher
from postroom.delivery.publication.record import Record
from postroom.delivery.settings import NatsSettings, PublisherSettings, RecordSettings

_contexts = count(1)
QUICK = PublisherSettings(ack_seconds=2, first_seconds=0.01, most_seconds=0.05, idle_seconds=0.01)


@dataclass
class Office:
    """A database, a NATS, and a context whose events have a stream."""

    pool: Pool
    nats_url: str
    context: str
    js: JetStreamContext

    @property
    def stream(self) -> str:
        return f"{self.context}_EVENTS".upper()

    async def add_stream(self, **options: Any) -> None:
        options = {"allow_atomic": True, **options}  # as a declared one
        await self.js.add_stream(name=self.stream, subjects=[f"{self.context}.event.>"], **options)

    async def emit(self, aggregate: str = "order-1", name: str = "order_placed", payload: str = "{}") -> str:
        query = "SELECT postroom.emit($1, 'order', $2, $3, $4::jsonb)::text"
        return str(await self.pool.fetchval(query, self.context, aggregate, name, payload))

    async def emit_many(self, events: int, aggregates: int = 1) -> None:
        query = (
            "SELECT count(postroom.emit($1, 'order', 'order-' || n % $3, 'order_placed', jsonb_build_object('n', n)))"
            " FROM generate_series(1, $2) AS n"
        )
        await self.pool.fetchval(query, self.context, events, aggregates)

    def source(self, table: Table = EVENTS) -> PostgresSource:
        return PostgresSource(self.pool, table, RecordSettings())

    def record(self, *tables: Table) -> Record:
        return Record([self.source(table) for table in tables or (EVENTS,)], RecordSettings())

    async def compare(self, record: Record) -> int:
        """Compare the streams with the record, as a worker does now and then."""
        link = await Link.open(NatsSettings(url=self.nats_url), name="test", ack_seconds=5)
        try:
            return await record.compare(link)
        finally:
            await link.close()

    def publisher(
        self,
        settings: PublisherSettings = QUICK,
        *,
        record: Record | None = None,
        url: str | None = None,
        table: Table = EVENTS,
        source: PostgresSource | None = None,
        apart: float = 0.0,
    ) -> Publisher:
        record = record or self.record(table)
        return Publisher(
            source or self.source(table),
            settings,
            NatsSettings(url=url or self.nats_url, connect_seconds=1),
            name="test",
            opened=record.compare,
            rng=Random(1),
            apart=apart,
        )

    async def unpublished(self) -> int:
        return int(await self.pool.fetchval("SELECT count(*) FROM postroom.outbox_events WHERE published_at IS NULL"))

    async def bury(self, *ids: str, payload: bytes = b"{}", consumer: str = "billing") -> None:
        """Keep a dead letter of each of these messages."""
        for message_id in ids:
            letter = DeadLetter(
                message_id=message_id,
                original_subject=f"{self.context}.event.order_placed.v1",
                reason="poison",
                attempts=1,
                consumer=consumer,
                died_at=datetime.now(UTC),
            )
            await RecordedLetters(self.pool, self.context).keep(letter.with_data(payload))

    async def drained(self) -> None:
        """Wait until nothing waits to be published."""
        await until_so(self.unpublished, holds=not_)

    async def messages(self, stream: str | None = None) -> list[Any]:
        """Read all that a stream holds, in order."""
        info = await self.js.stream_info(stream or self.stream)
        if not info.state.messages:
            return []
        subscription = await self.js.subscribe("", stream=stream or self.stream, ordered_consumer=True)
        found = [await subscription.next_msg(timeout=10) for _ in range(info.state.messages)]
        await subscription.unsubscribe()
        return found

    async def ids(self) -> list[str]:
        return [message.headers["Nats-Msg-Id"] for message in await self.messages()]


@pytest.fixture
async def office(database_url: str, nats_url: str) -> AsyncIterator[Office]:
    await migrate(database_url, ROOM)
    pool = await open_rooms(database_url, ROOM, name="publisher-tests", connections=8)
    client = await nats.connect(nats_url)
    context = f"sea{next(_contexts)}"
    office = Office(pool, nats_url, context, client.jetstream())
    yield office
    for info in await office.js.streams_info():
        if info.config.name.startswith(context.upper() + "_"):
            await office.js.delete_stream(info.config.name)
    await client.close()
    await pool.close()


@pytest.fixture
def running() -> Callable[..., Any]:
    """How to run publishers beside a test; they stop at its end."""

    @asynccontextmanager
    async def run(*publishers: Publisher) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(publisher.run()) for publisher in publishers]
        try:
            yield
        finally:
            stops: list[Awaitable[None]] = [publisher.stop() for publisher in publishers]
            await asyncio.gather(*stops)
            await asyncio.gather(*tasks)

    return run
