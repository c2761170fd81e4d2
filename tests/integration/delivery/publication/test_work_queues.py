"""What is taken out of a work queue by hand is published again by itself; what was acknowledged is not.

So is what is taken out of a stream of interest, which forgets what all of its consumers have acknowledged.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import nats
import pytest
from nats.js.errors import NotFoundError
from support.waiting import until_so

from embedded import EmbeddedNats
from postroom._wire.unpublished import PublishedFilter
from postroom.chassis.clock import now
from postroom.delivery.publication import record as module
from postroom.delivery.publication.link import Audit, Link
from postroom.delivery.publication.postgres import EVENTS, redrive
from postroom.delivery.publication.record import WorkQueues
from postroom.delivery.settings import NatsSettings, PublisherSettings

SECONDS = 60


class Watching:
    """A worker's look at the work queues, round by round, on a connection that hears."""

    def __init__(self, office: Any, url: str) -> None:
        self.office = office
        self.url = url
        self.record = office.record()
        self.queues = WorkQueues(office.pool, [office.source()], self.record)
        self.told = asyncio.Event()
        self.audit = Audit(self.told.set)
        self.link: Link | None = None

    async def round(self) -> int:
        """Look once; return how many commands are published again."""
        if self.link is None or self.link.broken:
            self.audit = Audit(self.told.set)
            self.link = await Link.open(NatsSettings(url=self.url), name="test", ack_seconds=5)
            await self.link.listen(self.audit)
        return await self.record.compare(self.link) + await self.queues.check(self.link, self.audit)

    async def close(self) -> None:
        if self.link is not None:
            await self.link.close()


class WorkQueue:
    """A work queue of the office's context, and somebody who works there."""

    def __init__(self, office: Any, url: str | None = None, *, retention: str = "workqueue") -> None:
        self.office = office
        self.url = url or office.nats_url
        self.retention = retention
        self.stream = f"{office.context}_COMMANDS".upper()
        self.done: Counter[str] = Counter()

    async def open(self, js: Any) -> None:
        subjects = [f"cmd.{self.office.context}.>"]
        await js.add_stream(name=self.stream, subjects=subjects, retention=self.retention)
        await js.add_consumer(self.stream, durable_name="clerk", ack_policy="explicit", filter_subjects=subjects)

    async def put(self, commands: int) -> None:
        await self.office.pool.execute(
            "INSERT INTO postroom.outbox_events (id, aggregate_type, aggregate_id, event_type, payload, subject) "
            "SELECT gen_random_uuid(), 'queue', 'work-' || n % 7, 'work', '{}', $1 FROM generate_series(1, $2) AS n",
            f"cmd.{self.office.context}.default.work.run", commands,
        )  # fmt: skip

    async def work(self, js: Any, most: int) -> int:
        """Take up to `most` commands, do them, and acknowledge them."""
        return len(await self._do(await self._take(js, most)))

    async def work_but(self, js: Any, most: int, every: int) -> list[str]:
        """Do the same, but for the first of each `every`, which stay in hand; return the ids of these."""
        batch = await self._take(js, most)
        await self._do([message for index, message in enumerate(batch) if index % every])
        return [message.headers["Nats-Msg-Id"] for message in batch[::every]]

    async def _take(self, js: Any, most: int) -> list[Any]:
        queue = await js.pull_subscribe_bind(durable="clerk", stream=self.stream)
        try:
            return list(await queue.fetch(most, timeout=0.5))
        except TimeoutError:
            return []
        finally:
            await queue.unsubscribe()

    async def _do(self, batch: Sequence[Any]) -> Sequence[Any]:
        self.done.update(message.headers["Nats-Msg-Id"].partition("/")[0] for message in batch)
        await asyncio.gather(*(message.ack_sync() for message in batch))
        return batch

    async def work_on(self) -> None:
        """Work for as long as there is a server, a queue, and nobody who cancels it."""
        while True:
            try:
                client = await nats.connect(self.url, allow_reconnect=False)
            except OSError:
                await asyncio.sleep(0.05)
                continue
            try:
                while client.is_connected:
                    await self.work(client.jetstream(timeout=1), 200)
            except (nats.errors.Error, NotFoundError, TimeoutError, OSError):
                await asyncio.sleep(0.05)
            finally:
                await client.close()

    async def has_done(self, commands: int, watch: Watching) -> None:
        """Return when so many different commands are done; the worker looks at the queue meanwhile."""
        async with asyncio.timeout(4 * SECONDS):
            while len(self.done) < commands:
                await watch.round()
                await asyncio.sleep(0.05)

    async def waiting(self) -> list[str]:
        info = await self.office.js.stream_info(self.stream)
        if not info.state.messages:
            return []
        numbers = range(info.state.first_seq, info.state.last_seq + 1)
        return [(await self.office.js.get_msg(self.stream, number)).headers["Nats-Msg-Id"] for number in numbers]

    async def commands(self) -> set[str]:
        return {row[0] for row in await self.office.pool.fetch("SELECT id::text FROM postroom.outbox_events")}


both_retentions = pytest.mark.parametrize("queue", ["workqueue", "interest"], indirect=True)


@pytest.fixture
async def queue(office: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> WorkQueue:
    monkeypatch.setattr(module, "_ADVISORY_SECONDS", 0)  # the tests wait until they were told
    queue = WorkQueue(office, retention=getattr(request, "param", "workqueue"))
    await queue.open(office.js)
    return queue


@asynccontextmanager
async def watching(office: Any, url: str | None = None) -> AsyncIterator[Watching]:
    watch = Watching(office, url or office.nats_url)
    try:
        yield watch
    finally:
        await watch.close()


async def publish(office: Any, running: Any) -> None:
    async with running(office.publisher()):
        await asyncio.wait_for(office.drained(), SECONDS)


async def rounds(watch: Watching) -> Sequence[int]:
    """Look twice: what is acknowledged at the first look counts as settled after the second."""
    return [await watch.round(), await watch.round()]


@both_retentions
async def test_what_a_purge_took_is_published_again_and_what_was_acknowledged_is_not(
    office: Any, queue: WorkQueue, running: Any
) -> None:
    await queue.put(20)
    await publish(office, running)
    async with watching(office) as watch:
        assert await queue.work(office.js, 5) == 5
        assert await rounds(watch) == [5, 0]  # nobody has looked before: five might have been purged
        await publish(office, running)
        assert await queue.work(office.js, 5) == 5
        assert await rounds(watch) == [0, 0]

        await office.js.purge_stream(queue.stream)
        await asyncio.wait_for(watch.told.wait(), SECONDS)
        assert await rounds(watch) == [15, 0]
        await publish(office, running)
    waiting = await queue.waiting()
    assert {identity.partition("/")[0] for identity in waiting} | set(queue.done) == await queue.commands()
    assert len(waiting) == 15


@pytest.mark.parametrize("queue", ["interest"], indirect=True)
async def test_what_one_of_two_consumers_has_not_acknowledged_is_published_again_after_a_purge(
    office: Any, queue: WorkQueue, running: Any
) -> None:
    own = f"cmd.{office.context}.default.work.>"
    await office.js.add_consumer(queue.stream, durable_name="slow", ack_policy="explicit", filter_subjects=[own])
    await queue.put(20)
    await publish(office, running)
    async with watching(office) as watch:
        assert await queue.work(office.js, 20) == 20
        assert await rounds(watch) == [0, 0]
        await office.js.purge_stream(queue.stream)
        await asyncio.wait_for(watch.told.wait(), SECONDS)
        assert await rounds(watch) == [20, 0]


@both_retentions
async def test_a_purge_that_nobody_saw_is_made_up_for_at_the_next_start(
    office: Any, queue: WorkQueue, running: Any
) -> None:
    await queue.put(20)
    await publish(office, running)
    async with watching(office) as watch:
        await rounds(watch)
    await office.js.purge_stream(queue.stream)
    async with watching(office) as watch:
        assert await rounds(watch) == [20, 0]


@both_retentions
async def test_what_was_done_while_nobody_watched_comes_again_once_and_what_was_settled_before_never(
    office: Any, queue: WorkQueue, running: Any
) -> None:
    async with watching(office) as watch:
        await watch.round()
        await queue.put(20)
        await publish(office, running)
        assert await queue.work(office.js, 20) == 20
        assert await rounds(watch) == [0, 0]
    await queue.put(3)
    await publish(office, running)
    assert await queue.work(office.js, 2) == 2
    async with watching(office) as watch:
        assert await rounds(watch) == [2, 0]
    async with watching(office) as watch:
        assert await rounds(watch) == [0, 0]


async def test_one_that_is_in_hand_for_long_keeps_nobody_elses_work_from_being_settled(
    office: Any, queue: WorkQueue, running: Any
) -> None:
    other = f"cmd.{office.context}.default.other.run"
    await office.js.update_stream(
        (await office.js.stream_info(queue.stream)).config.evolve(subjects=[f"cmd.{office.context}.>"])
    )
    await office.js.delete_consumer(queue.stream, "clerk")
    own = f"cmd.{office.context}.default.work.>"
    await office.js.add_consumer(queue.stream, durable_name="clerk", ack_policy="explicit", filter_subjects=[own])
    async with watching(office) as watch:
        await watch.round()
        await office.pool.execute(
            "INSERT INTO postroom.outbox_events (id, aggregate_type, aggregate_id, event_type, payload, subject) "
            "VALUES (gen_random_uuid(), 'queue', 'other', 'other', '{}', $1)", other,
        )  # fmt: skip
        await publish(office, running)
        await queue.put(20)
        await publish(office, running)
        assert await queue.work(office.js, 20) == 20
        await rounds(watch)
    async with watching(office) as watch:
        assert await rounds(watch) == [0, 0]


@both_retentions
async def test_a_single_command_that_was_deleted_is_published_again(
    office: Any, queue: WorkQueue, running: Any
) -> None:
    await queue.put(5)
    await publish(office, running)
    async with watching(office) as watch:
        await rounds(watch)
        gone = (await queue.waiting())[2]
        await office.js.delete_msg(queue.stream, 3)
        await asyncio.wait_for(watch.told.wait(), SECONDS)
        assert await watch.round() == 1
        await publish(office, running)
    again = (await office.js.get_msg(queue.stream, 6)).headers["Nats-Msg-Id"]
    assert again == f"{gone}/1"


async def test_what_is_published_but_not_marked_when_the_purge_comes_is_waited_for(
    office: Any, queue: WorkQueue
) -> None:
    async with watching(office) as watch:
        await rounds(watch)
        await queue.put(1)
        async with office.source().claim(PublisherSettings()) as claim:
            (message,) = claim.messages
            link = watch.link
            assert link is not None
            (place,) = await link.publish([message])
            await office.js.purge_stream(queue.stream)
            await asyncio.wait_for(watch.told.wait(), SECONDS)
            looking = asyncio.create_task(watch.round())
            await until_so(lambda: office.pool.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))
            await claim.settle([(message, place)], [], [])
        assert await looking == 1


async def test_what_a_purged_queue_swallows_as_known_is_published_under_a_fresh_id(
    office: Any, queue: WorkQueue, running: Any
) -> None:
    """A publisher that published, was not acknowledged in time, and publishes again after a purge."""
    await queue.put(1)
    (identity,) = await queue.commands()
    subject = f"cmd.{office.context}.default.work.run"
    await office.js.publish(subject, b"{}", headers={"Nats-Msg-Id": identity})
    await office.js.purge_stream(queue.stream)
    await publish(office, running)
    assert await queue.waiting() == [f"{identity}/1"]


@both_retentions
async def test_what_was_settled_stays_so_though_a_new_queue_gives_its_numbers_to_others(
    office: Any, queue: WorkQueue, running: Any
) -> None:
    await queue.put(50)
    await publish(office, running)
    async with watching(office) as watch:
        await watch.round()
        assert await queue.work(office.js, 50) == 50
        assert await rounds(watch) == [0, 0]
        await office.js.delete_stream(queue.stream)
        await queue.open(office.js)
        await queue.put(60)
        await publish(office, running)
        assert await rounds(watch) == [0, 0]
    assert set(await queue.waiting()) == await queue.commands() - set(queue.done)
    assert await redriven(office, confirmed=False) == 60
    assert await redriven(office, confirmed=True) == 110


@both_retentions
async def test_what_was_done_behind_one_that_waits_is_settled_too(office: Any, queue: WorkQueue, running: Any) -> None:
    """The consumer's floor stands at its oldest message in hand, however much it has done since."""
    await queue.put(50)
    await publish(office, running)
    async with watching(office) as watch:
        await watch.round()
        waiting = await queue.work_but(office.js, 50, every=10)
        assert len(waiting) == 5
        assert await rounds(watch) == [0, 0]
        await office.js.delete_stream(queue.stream)
        await queue.open(office.js)
        await queue.put(60)
        await publish(office, running)
        await watch.round()
        await publish(office, running)
    identities = {identity.partition("/")[0] for identity in await queue.waiting()}
    assert identities == await queue.commands() - set(queue.done)
    assert set(waiting) <= identities


@both_retentions
async def test_of_what_was_purged_nothing_counts_as_done(office: Any, queue: WorkQueue, running: Any) -> None:
    """Seen from afar it looks the same: numbers that are gone behind one that is there."""
    await queue.put(20)
    await publish(office, running)
    async with watching(office) as watch:
        await rounds(watch)
        for number in range(2, 20):
            await office.js.delete_msg(queue.stream, number)
        await asyncio.wait_for(watch.told.wait(), SECONDS)
        assert sum(await rounds(watch)) == 18
        await publish(office, running)
        assert await rounds(watch) == [0, 0]
        await office.js.delete_stream(queue.stream)
        await queue.open(office.js)
        assert sum(await rounds(watch)) == 20


async def redriven(office: Any, *, confirmed: bool) -> int:
    wanted = PublishedFilter(since=datetime(2000, 1, 1, tzinfo=UTC), confirmed=confirmed)
    async with office.pool.acquire() as connection:
        until = await now(connection)
        ((one,), _) = await redrive(connection, wanted, until=until, dry_run=True, tables=[EVENTS])
    return one.messages


async def test_what_a_queue_swallows_as_known_and_an_inbox_has_as_handled_is_not_published_again(
    office: Any, queue: WorkQueue, running: Any
) -> None:
    """A publisher that was killed before its mark, and a consumer that was quicker than the next one."""
    await queue.put(1)
    (identity,) = await queue.commands()
    await office.js.publish(f"cmd.{office.context}.default.work.run", b"{}", headers={"Nats-Msg-Id": identity})
    await office.pool.execute(
        "INSERT INTO postroom.inbox_messages (consumer, source_context, message_id, subject, processed_at) "
        "VALUES ('clerk', $1, $2, 'any', now())", office.context, identity,
    )  # fmt: skip
    assert await queue.work(office.js, 1) == 1
    await publish(office, running)
    assert await queue.waiting() == []


@pytest.mark.parametrize("commands", [600, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_every_command_has_its_effect_though_the_queue_is_purged_under_load(
    office: Any, queue: WorkQueue, running: Any, commands: int
) -> None:
    async with watching(office) as watch, running(office.publisher()):
        await watch.round()
        worker = asyncio.create_task(queue.work_on())
        for third in range(3):
            await queue.put(commands // 3)
            await queue.has_done(third * commands // 3 + commands // 10, watch)
            await office.js.purge_stream(queue.stream)
            await asyncio.wait_for(watch.told.wait(), SECONDS)
            watch.told.clear()
            await watch.round()
        await queue.has_done(commands // 3 * 3, watch)
        worker.cancel()
    assert set(queue.done) == await queue.commands()


@pytest.mark.parametrize("commands", [600, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_every_command_has_its_effect_though_the_store_is_deleted_under_load(
    office: Any, running: Any, short_directory: Any, monkeypatch: pytest.MonkeyPatch, commands: int
) -> None:
    monkeypatch.setattr(module, "_ADVISORY_SECONDS", 0)
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    queue = WorkQueue(office, server.url)

    async def open_desk() -> None:
        client = await nats.connect(server.url)
        await queue.open(client.jetstream())
        await client.close()

    await open_desk()
    async with watching(office, server.url) as watch, running(office.publisher(url=server.url)):
        await watch.round()
        worker = asyncio.create_task(queue.work_on())
        await queue.put(commands // 2)
        await queue.has_done(commands // 10, watch)
        await watch.round()
        await watch.round()
        server.stop()
        shutil.rmtree(server.directory / "jetstream")
        await queue.put(commands // 2)
        server.start()
        await open_desk()
        await queue.has_done(commands, watch)
        worker.cancel()
    server.stop()
    assert set(queue.done) == await queue.commands()
