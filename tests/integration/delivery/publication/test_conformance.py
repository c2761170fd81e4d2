"""What holds of every source, whatever its database: the same rules for both forms."""

from __future__ import annotations

import asyncio
import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pytest
from support.waiting import until_so

from postroom.agent import Envelope
from postroom.delivery.agents.outgoing import AgentCounters, StoreClaim, StoreSource, stored
from postroom.delivery.agents.store import NO_HASH, Changes, Owner, Store, encode_record, next_hash
from postroom.delivery.agents.store import Event as StoredEvent
from postroom.delivery.agents.store import Record as Event
from postroom.delivery.agents.turns import Turns
from postroom.delivery.publication import Outgoing, Place, Source, record
from postroom.delivery.publication.link import Audit, Link
from postroom.delivery.publication.postgres import EVENTS, PostgresSource
from postroom.delivery.publication.publisher import Publisher
from postroom.delivery.publication.record import Record, WorkQueues
from postroom.delivery.settings import NatsSettings, PublisherSettings, RecordSettings

CREATED = datetime(2026, 1, 1, tzinfo=UTC)


class Form(ABC):
    """Rows in one kind of database, and a publisher and a record over them."""

    source: Source

    def __init__(self, office: Any, settings: RecordSettings) -> None:
        self.office = office
        self.nats = NatsSettings(url=office.nats_url, connect_seconds=1)
        self.settings = settings
        self.queue = f"{office.context}_COMMANDS".upper()

    def begin(self) -> None:
        self.record = Record([self.source], self.settings)
        self.publisher = Publisher(
            self.source, PublisherSettings(ack_seconds=2), self.nats, name="test", opened=self.look, rng=Random(1)
        )

    async def add_queue(self, retention: str = "workqueue") -> None:
        subjects = [f"cmd.{self.office.context}.>"]
        await self.office.js.add_stream(name=self.queue, subjects=subjects, retention=retention)
        await self.office.js.add_consumer(
            self.queue, durable_name="clerk", ack_policy="explicit", filter_subjects=subjects
        )

    async def work(self, messages: int) -> None:
        """Handle so many commands of the queue."""
        clerk = await self.office.js.pull_subscribe_bind(durable="clerk", stream=self.queue)
        await asyncio.gather(*[message.ack_sync() for message in await clerk.fetch(messages, timeout=5)])
        await clerk.unsubscribe()

    async def waiting(self) -> list[str]:
        """Return the ids of the commands that are in the queue."""
        state = (await self.office.js.stream_info(self.queue)).state
        numbers = range(state.first_seq, state.last_seq + 1) if state.messages else ()
        return [(await self.office.js.get_msg(self.queue, number)).headers["Nats-Msg-Id"] for number in numbers]

    async def compare(self) -> int:
        """Look at the streams as its process does now and then; return how much is published again."""
        return await self.look(await self.publisher.connected())

    @abstractmethod
    async def open(self, stack: AsyncExitStack, directory: Path) -> None: ...

    @abstractmethod
    async def put(self, messages: int, *, command: bool = False) -> list[str]:
        """Write so many rows, and return their messages' ids in order."""

    @abstractmethod
    async def publish(self) -> None:
        """Publish everything that is not published."""

    @abstractmethod
    async def publish_ahead(self) -> None:
        """Publish it under a clock that is a day ahead."""

    @abstractmethod
    async def look(self, link: Link) -> int: ...

    @abstractmethod
    async def unpublished(self) -> Sequence[Outgoing]: ...

    @abstractmethod
    async def settle(self, message: Outgoing, place: Place) -> bool: ...


class InPostgres(Form):
    async def open(self, stack: AsyncExitStack, directory: Path) -> None:
        del stack, directory
        self.source = self.rows = PostgresSource(self.office.pool, EVENTS, self.settings)
        self.begin()
        self.queues = WorkQueues(self.office.pool, [self.rows], self.record)
        self.audit = Audit(lambda: None)
        self.heard: Link | None = None

    async def put(self, messages: int, *, command: bool = False) -> list[str]:
        if not command:
            return [await self.office.emit() for _ in range(messages)]
        emit = "SELECT postroom.emit_command($1, 'work', '{}')::text"
        return [await self.office.pool.fetchval(emit, self.office.context) for _ in range(messages)]

    async def publish(self) -> None:
        while await self.publisher.step():
            pass

    async def publish_ahead(self) -> None:
        await self.publish()
        a_day_later = "UPDATE postroom.outbox_events SET published_at = published_at + interval '1 day'"
        await self.office.pool.execute(a_day_later)

    async def look(self, link: Link) -> int:
        if self.heard is not link:
            self.heard, self.audit = link, Audit(lambda: None)
            await link.listen(self.audit)
        return await self.record.compare(link) + await self.queues.check(link, self.audit)

    async def unpublished(self) -> Sequence[Outgoing]:
        async with self.rows.claim(PublisherSettings()) as claim:
            return claim.messages

    async def settle(self, message: Outgoing, place: Place) -> bool:
        async with self.rows.claim(PublisherSettings()) as claim:
            return await claim.settle([(message, place)], [], [])


class InSqlite(Form):
    async def open(self, stack: AsyncExitStack, directory: Path) -> None:
        self.turns = Turns(directory)
        stack.callback(self.turns.close)
        self.store = await Store.open(directory / "events.db", Owner("counting", self.office.context, "default"))
        stack.push_async_callback(self.store.close)
        clock = lambda: time.time_ns() // 1_000_000  # noqa: E731 - as the runtime's
        self.source = self.rows = StoreSource(self.store, self.turns, self.settings, AgentCounters(), clock)
        self.last = StoredEvent(0, b"", NO_HASH)
        self.begin()

    async def put(self, messages: int, *, command: bool = False) -> list[str]:
        context = self.office.context
        subject = f"cmd.{context}.default.work.run" if command else f"{context}.event.order_placed.v1"
        cause = self.last.position + 1
        events, ids = [self._event(Event(cause=None, envelope=self._envelope(), role="handled", subject="any"))], []
        for _ in range(messages):
            envelope = self._envelope()
            events.append(self._event(Event(cause=cause, envelope=envelope, role="emitted", subject=subject)))
            ids.append(envelope.id)
        await self.store.append(Changes(events, {}, 0, [], []))
        return ids

    def _envelope(self) -> Envelope:
        identity = hashlib.sha256(f"{self.office.context} {self.last.position}".encode()).hexdigest()[:32]
        return Envelope(id=identity, type="order_placed", idempotency_key=identity, ts=CREATED)

    def _event(self, event: Event) -> StoredEvent:
        record = encode_record(event, b"{}")
        self.last = StoredEvent(self.last.position + 1, record, next_hash(self.last.state_hash, record))
        return self.last

    async def publish(self) -> None:
        while messages := await self.unpublished():
            await self.publisher.publish(StoreClaim(self.rows, messages))

    async def publish_ahead(self) -> None:
        clock, self.rows._clock = self.rows._clock, lambda: clock() + 86_400_000
        await self.publish()
        self.rows._clock = clock

    async def look(self, link: Link) -> int:
        found = await self.record.compare(link)
        await self.rows.note_handled(link)
        return found

    async def unpublished(self) -> Sequence[Outgoing]:
        return [stored(row) for row in await self.store.unpublished()]

    async def settle(self, message: Outgoing, place: Place) -> bool:
        return await StoreClaim(self.rows, [message]).settle([(message, place)], [], [])


@pytest.fixture
def settings() -> RecordSettings:
    return RecordSettings()


@pytest.fixture(params=[InPostgres, InSqlite])
async def form(
    office: Any,
    request: pytest.FixtureRequest,
    settings: RecordSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Form]:
    monkeypatch.setattr(record, "_ADVISORY_SECONDS", 0)
    async with AsyncExitStack() as stack:
        form: Form = request.param(office, settings)
        await form.open(stack, tmp_path)
        stack.push_async_callback(form.publisher.stop)
        await office.add_stream()
        yield form


async def test_rows_are_published_once_and_in_order(form: Form) -> None:
    ids = await form.put(50)
    await form.publish()
    await form.publish()
    assert await form.office.ids() == ids
    assert await form.compare() == 0
    assert list(await form.unpublished()) == []


async def test_each_loss_of_a_stream_begins_another_epoch(form: Form) -> None:
    ids = await form.put(20)
    await form.publish()
    assert await form.compare() == 0
    await form.office.js.purge_stream(form.office.stream)
    assert await form.compare() == 20
    await form.publish()
    assert await form.office.ids() == [f"{identity}/1" for identity in ids]

    await form.office.js.delete_stream(form.office.stream)
    await form.office.add_stream()
    assert await form.compare() == 20
    await form.publish()
    assert await form.office.ids() == [f"{identity}/2" for identity in ids]
    assert await form.compare() == 0


async def test_what_is_lost_is_found_though_new_messages_have_its_numbers(form: Form) -> None:
    ids = await form.put(10)
    await form.publish()
    await form.office.js.delete_stream(form.office.stream)
    await form.office.add_stream()
    later = await form.put(15)
    await form.publish()
    await form.compare()
    await form.publish()
    found = await form.office.ids()
    assert {identity.partition("/")[0] for identity in found} == {*ids, *later}
    assert {f"{identity}/1" for identity in ids} <= set(found)
    assert await form.compare() == 0


async def test_only_the_missing_part_of_a_stream_is_published_again(form: Form) -> None:
    ids = await form.put(10)
    await form.publish()
    assert await form.compare() == 0
    await form.office.js.purge_stream(form.office.stream, keep=4)
    assert await form.compare() == 6
    await form.publish()
    assert await form.office.ids() == [*ids[6:], *(f"{identity}/1" for identity in ids[:6])]


async def test_of_two_rows_with_one_number_both_are_published_again(form: Form) -> None:
    """Which of them the stream has lost, nobody knows."""
    await form.put(2)
    first, second = await form.unpublished()
    place = Place(form.office.stream, CREATED, 7, duplicate=False)
    assert not await form.settle(first, place)
    assert len(await form.unpublished()) == 1
    assert await form.settle(second, place)
    assert len(await form.unpublished()) == 2


async def test_a_number_in_another_stream_of_that_name_is_another_number(form: Form) -> None:
    await form.put(2)
    first, second = await form.unpublished()
    assert not await form.settle(first, Place(form.office.stream, CREATED, 7, duplicate=False))
    assert not await form.settle(second, Place(form.office.stream, datetime.now(UTC), 7, duplicate=False))


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_what_a_queue_handled_is_not_published_again_with_the_queue(form: Form, retention: str) -> None:
    await form.add_queue(retention)
    ids = await form.put(10, command=True)
    await form.publish()
    await form.work(9)
    for _ in range(3):
        assert await form.compare() == 0
    await form.office.js.delete_stream(form.queue)
    await form.add_queue(retention)
    assert await form.compare() == 1
    await form.publish()
    assert await form.waiting() == [f"{ids[-1]}/1"]
    await form.work(1)
    for _ in range(3):
        assert await form.compare() == 0


@pytest.mark.parametrize("retention", ["workqueue", "interest"])
async def test_what_a_queue_handled_stays_so_though_a_new_queue_gives_its_numbers_away(
    form: Form, retention: str
) -> None:
    await form.add_queue(retention)
    await form.put(5, command=True)
    await form.publish()
    await form.work(5)
    for _ in range(3):
        assert await form.compare() == 0
    await form.office.js.delete_stream(form.queue)
    await form.add_queue(retention)
    later = await form.put(5, command=True)
    await form.publish()
    assert await form.compare() == 0
    assert await form.waiting() == later


async def test_one_that_no_stream_takes_keeps_no_other_row_of_another_aggregate(form: Form) -> None:
    await form.put(1, command=True)  # there is no queue for it
    ids = await form.put(3)
    publishing = asyncio.create_task(form.publish())
    await until_so(form.office.ids, holds=lambda found: found == ids)
    await form.add_queue()
    await asyncio.wait_for(publishing, 30)
    while not await form.waiting():
        await form.publish()


@pytest.mark.parametrize("settings", [RecordSettings(horizon_days=-1)])
async def test_what_is_older_than_the_horizon_stays_lost(form: Form) -> None:
    await form.put(5)
    await form.publish()
    await form.office.js.purge_stream(form.office.stream)
    assert await form.compare() == 0


@pytest.mark.parametrize("deleted", [True, False])
async def test_what_a_clock_ahead_has_dated_is_published_again_where_it_is_lost(form: Form, *, deleted: bool) -> None:
    await form.put(5)
    await form.publish_ahead()
    assert await form.compare() == 0
    if deleted:
        await form.office.js.delete_stream(form.office.stream)
        await form.office.add_stream()
    else:
        await form.office.js.purge_stream(form.office.stream)
    assert await form.compare() == 5
    await form.publish()
    assert await form.compare() == 0


async def test_what_a_queue_handled_stays_so_though_a_clock_ahead_has_dated_it(form: Form) -> None:
    await form.add_queue()
    await form.put(5, command=True)
    await form.publish_ahead()
    await form.work(5)
    assert [await form.compare() for _ in range(2)] == [0, 0]
    assert list(await form.unpublished()) == []


@pytest.mark.parametrize("settings", [RecordSettings(keep_days=-1)])
async def test_what_was_published_long_ago_is_forgotten(form: Form) -> None:
    await form.put(5)
    await form.publish()
    await form.record.prune()
    await form.office.js.purge_stream(form.office.stream)
    assert await form.compare() == 0
