"""The store of NATS is deleted: dead letters are back, what waited is handled once, and what was done is not again."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import nats
import pytest
from nats.js.errors import NotFoundError
from support.handlers import serving
from support.http_consumers import consuming
from support.mailroom import worker
from support.operated import operated_broker
from support.terminal import Terminal
from support.waiting import until_so

from broker.database import migrate
from embedded import EmbeddedNats
from postroom._wire.dead_letters import DeadLetter
from postroom.delivery.dead_letters import RecordedLetters
from postroom.delivery.settings import ConsumerSettings, HandlerSettings, NatsSettings
from postroom.worker.config import ConsumerConfig

DONE, WAITING = "cmd.demo.default.done.run", "cmd.demo.default.waiting.run"
PAY = "SELECT count(postroom.emit('demo', 'order', 'o' || n, 'order_paid', '{}')) FROM generate_series(1, $1) AS n"
EMIT = "SELECT count(postroom.emit_command('demo', $1, '{}', 'queue', 'a' || n % 20)) FROM generate_series(1, $2) AS n"


class Clerk:
    """Somebody who works at a queue, remembers nothing between two messages, and counts what he is given."""

    def __init__(self, url: str, subject: str) -> None:
        self.given: Counter[str] = Counter()
        self._url = url
        self._subject = subject
        self._stopping = False

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self._work())
        try:
            yield
        finally:
            self._stopping = True
            await task

    async def _work(self) -> None:
        client = await nats.connect(self._url, max_reconnect_attempts=-1, reconnect_time_wait=0.1)
        js = client.jetstream(timeout=2)
        while not self._stopping:
            try:
                queue = await js.pull_subscribe(self._subject, durable=self._subject.split(".")[3])
                while not self._stopping:
                    for message in await queue.fetch(200, timeout=1):
                        self.given[message.headers["Nats-Msg-Id"].partition("/")[0]] += 1
                        await message.ack_sync()
            except (NotFoundError, nats.errors.Error, TimeoutError, OSError):
                await asyncio.sleep(0.05)  # nothing waits, or there is no server, or no queue yet
        await client.close()


@pytest.fixture
def server(short_directory: Path) -> Any:
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    yield server
    server.stop()


@pytest.mark.parametrize("scale", [1, pytest.param(10, marks=pytest.mark.soak)])
async def test_a_lost_store_brings_letters_and_what_waited_back_and_nothing_that_was_done(
    database_url: str, server: EmbeddedNats, short_directory: Path, scale: int
) -> None:
    letters, waiting, done, further = 10 * scale, 50 * scale, 500 * scale, 1000 * scale
    await migrate(database_url)
    settings = {
        "POSTROOM_DATABASE_URL": database_url,
        "POSTROOM_NATS_URL": server.url,
        "POSTROOM_WORKER_RECORD_CHECK_SECONDS": "1.1",
    }
    clerk, late = Clerk(server.url, DONE), Clerk(server.url, WAITING)
    async with asyncpg.create_pool(database_url, min_size=1, max_size=2) as pool:
        await pool.execute("INSERT INTO mesh.mesh (slug) VALUES ('demo')")
        with worker(**settings):
            async with clerk.working():
                for part in range(10):  # what waits lies among what is done
                    await pool.execute(EMIT, "done", done // 10)
                    await pool.execute(EMIT, "waiting", waiting // 10)
                    await bury(pool, letters // 10, part)
                await until_so(lambda: equal(clerk, done))
                await until_so(lambda: settled(pool, done))
                await until_so(lambda: published(pool))
                server.stop()
                shutil.rmtree(server.directory / "jetstream")
                server.start()
                await pool.execute(EMIT, "done", further)
                async with late.working():
                    await until_so(lambda: equal(clerk, done + further))
                    await until_so(lambda: equal(late, waiting))
                    await until_so(lambda: published(pool))
            client = await nats.connect(server.url)
            assert (await client.jetstream().stream_info("DEMO_DLQ")).state.messages == letters
            await client.close()
    print(f"{letters} letters, {len(clerk.given)} done and {len(late.given)} waiting handled")  # noqa: T201
    assert Counter(clerk.given.values()) == {1: done + further}
    assert Counter(late.given.values()) == {1: waiting}
    with operated_broker(short_directory, database_url, NatsSettings(url=server.url)) as reach:
        user = Terminal(POSTROOM_MESH="demo", **reach)
        listed = await asyncio.to_thread(user.run, "dlq", "list", "--json")
    assert len(listed.json) == letters


async def test_a_lost_store_brings_back_what_one_consumer_has_handled_and_another_has_not(
    database_url: str, server: EmbeddedNats
) -> None:
    await migrate(database_url)
    settings = {
        "POSTROOM_DATABASE_URL": database_url,
        "POSTROOM_NATS_URL": server.url,
        "POSTROOM_WORKER_RECORD_CHECK_SECONDS": "0.2",
    }
    async with asyncpg.create_pool(database_url, min_size=1, max_size=2) as pool, serving() as handler:
        await pool.execute("INSERT INTO mesh.mesh (slug) VALUES ('demo')")
        consumer = ConsumerConfig(
            context="demo",
            database_url=database_url,
            nats=NatsSettings(url=server.url),
            consumer=ConsumerSettings(stream="DEMO_EVENTS", durable="billing"),
            handler=HandlerSettings(url=handler.url),
        )
        with worker(**settings):
            await until_so(lambda: has_events(server.url))
            early = await take(server.url, 0)  # which makes it
            async with consuming(consumer):
                await pool.execute(PAY, 20)
                await until_so(lambda: acknowledged(pool, "billing", 20))
                early += await take(server.url, 5)
                await until_so(lambda: acknowledged(pool, "slow", 5))
                server.stop()
                shutil.rmtree(server.directory / "jetstream")
                server.start()
                await until_so(lambda: published_again(pool, 15))
                late = await take(server.url, 15)
    assert len({*early, *late}) == 20
    assert Counter(handler.ids()) == Counter([*early, *late])


async def take(url: str, count: int) -> list[str]:
    """Acknowledge some messages as a consumer that remembers nothing, and has fallen behind; return their ids."""
    client = await nats.connect(url)
    try:
        slow = await client.jetstream().pull_subscribe("demo.event.>", durable="slow")
        taken = await slow.fetch(count, timeout=10) if count else []
        for message in taken:
            await message.ack_sync(timeout=10)
        return [message.headers["Nats-Msg-Id"].partition("/")[0] for message in taken]
    finally:
        await client.close()


async def has_events(url: str) -> bool:
    client = await nats.connect(url)
    try:
        return bool(await client.jetstream().stream_info("DEMO_EVENTS"))
    except NotFoundError:
        return False
    finally:
        await client.close()


async def acknowledged(pool: Any, consumer: str, floor: int) -> bool:
    """Tell whether the record knows how far a consumer is."""
    query = "SELECT floor FROM postroom.consumer_floors WHERE consumer = $1"
    return bool(await pool.fetchval(query, consumer) == floor)


async def published_again(pool: Any, count: int) -> bool:
    query = "SELECT count(*) FROM postroom.outbox_events WHERE epoch = 1 AND published_at IS NOT NULL"
    return bool(await pool.fetchval(query) == count)


async def bury(pool: Any, count: int, part: int) -> None:
    record = RecordedLetters(pool, "demo")
    for number in range(count):
        letter = DeadLetter(
            message_id=f"{part}-{number}",
            original_subject="demo.event.orders.v1",
            reason="poison",
            attempts=1,
            consumer="billing",
            died_at=datetime.now(UTC),
        )
        await record.keep(letter.with_data(json.dumps({"number": number}).encode()))


async def equal(clerk: Clerk, count: int) -> bool:
    return len(clerk.given) >= count


async def settled(pool: Any, count: int) -> bool:
    """Tell whether the record knows of all that was done."""
    query = (
        "SELECT count(*) FROM postroom.outbox_events AS event WHERE subject = $1 "
        "AND postroom.is_settled(stream, stream_created_at, stream_sequence, subject)"
    )
    return bool(await pool.fetchval(query, DONE) >= count)


async def published(pool: Any) -> bool:
    query = (
        "SELECT (SELECT count(*) FROM postroom.outbox_events WHERE published_at IS NULL) "
        "+ (SELECT count(*) FROM postroom.dead_letters WHERE published_at IS NULL)"
    )
    return not await pool.fetchval(query)
