"""No message stops a reader: whatever bytes lie in a stream, each is handled or buried, and what follows is handled."""

from __future__ import annotations

import asyncio
import base64
import gc
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest
from support.hostile import HostileMessage, byte_writer, odd_messages, odd_subjects, quiet_logs, random_messages
from support.jetstream import Context, Script

from postroom._wire.dead_letters import LetterFilter
from postroom.chassis.postgres import connected, migrate
from postroom.delivery import ROOM
from postroom.delivery.consumer import Consumer
from postroom.delivery.dead_letters.operations import LetterOperations
from postroom.delivery.nats import UNREADABLE, UNREADABLE_SUBJECT
from postroom.delivery.publication.link import ADVISORIES, Audit
from postroom.delivery.publication.record import message_id_at

pytestmark = pytest.mark.usefixtures("quiet")

GOOD = [f"good-{number}" for number in range(20)]


@pytest.fixture
def quiet() -> Iterator[None]:
    with quiet_logs():
        yield


async def last_sequence(context: Context) -> int:
    return (await context.js.stream_info(context.events)).state.last_seq


async def accounted(context: Context, script: Script, consumer: Consumer) -> None:
    """Check that each message of the stream was handled or is a dead letter, and none is both."""
    buried = Counter(letter.sequence for letter in await context.letters())
    handled = Counter(delivery.sequence for delivery in script.seen)
    assert buried | handled == Counter(range(1, await last_sequence(context) + 1))
    assert not buried & handled
    assert consumer.counters.done + consumer.counters.dead_lettered == await last_sequence(context)


async def test_every_odd_message_is_handled_or_buried_and_the_good_ones_go_on(context: Context, nats_url: str):
    script = Script()
    async with context.consuming(script) as consumer, byte_writer(nats_url) as raw:
        await raw.publish(context.subject, odd_messages())
        await context.publish(GOOD)
        await context.settled()
        await accounted(context, script, consumer)
    assert set(GOOD) <= set(script.ids())


@pytest.mark.parametrize("seed", [1, 2])
async def test_random_bytes_stop_no_consumer(context: Context, nats_url: str, seed: int):
    script = Script()
    async with context.consuming(script) as consumer, byte_writer(nats_url) as raw:
        await raw.publish(context.subject, random_messages(200, seed=seed))
        await context.publish(GOOD)
        await context.settled()
        await accounted(context, script, consumer)
    assert set(GOOD) <= set(script.ids())


async def test_odd_subjects_stop_no_consumer(context: Context, nats_url: str):
    script = Script()
    async with context.consuming(script) as consumer, byte_writer(nats_url) as raw:
        for subject in odd_subjects(f"{context.name}.event"):
            messages = [HostileMessage(None, b"{}"), HostileMessage(b"NATS/1.0\r\n\r\n", b"{}")]
            await raw.publish(subject, messages)
        await context.publish(GOOD)
        await context.settled()
        await accounted(context, script, consumer)
    assert set(GOOD) <= set(script.ids())
    (letter, *_) = await context.letters()
    assert base64.b64decode(letter.headers[UNREADABLE_SUBJECT]) == f"{context.name}.event.".encode() + b"\xff"


@pytest.mark.parametrize("length", range(1, 11))
async def test_a_short_header_block_is_buried_with_its_bytes(context: Context, nats_url: str, length: int):
    block = b"NATS/1.0\r\n"[:length]
    script = Script()
    async with context.consuming(script), byte_writer(nats_url) as raw:
        await raw.publish(context.subject, [HostileMessage(block, b"the body")])
        await context.publish(["good"])
        await context.settled()
    (letter,) = await context.letters()
    assert (letter.reason, letter.data(), script.ids()) == ("unreadable", b"the body", ["good"])
    assert base64.b64decode(letter.headers[UNREADABLE]) == block


async def test_one_message_that_a_handler_cannot_bear_takes_no_other_along(context: Context):
    class Fragile(Script):
        async def handle(self, batch, settle):
            if any(delivery.message_id == "good-7" and delivery.attempt < 4 for delivery in batch):
                raise OverflowError("it is too large for a column")
            await super().handle(batch, settle)

    script = Fragile()
    await context.publish(GOOD)
    async with context.consuming(script):
        await context.settled()
    assert sorted(each or "" for each in script.ids()) == sorted(GOOD)
    assert [delivery.message_id for delivery in script.seen if delivery.attempt > 1] == ["good-7"]
    assert await context.letters() == []


async def test_what_lies_in_a_stream_of_dead_letters_is_listed_and_dropped_whatever_it_is(
    context: Context, nats_url: str, database_url: str
):
    await migrate(database_url, ROOM)
    async with byte_writer(nats_url) as raw:
        await raw.publish(f"{context.name}.dlq.order_placed.v1", odd_messages())
    last = (await context.js.publish(f"{context.name}.dlq.order_placed.v1", b"the last")).seq
    async with connected(database_url) as connection:
        letters = LetterOperations(connection, context.js, context.name, actor="test")
        found = await letters.find(LetterFilter())
        assert [stored.id for stored in found] == [f"{context.dlq}/{number}" for number in range(1, last + 1)]
        info = await context.js.stream_info(context.dlq)
        assert (await letters.count_unrecorded(info), await letters.notes()) == (last, [])
        outcomes = await letters.settle("drop", found, why="a test")
        assert outcomes == dict.fromkeys([stored.id for stored in found])
        assert (await letters.count_unrecorded(info), len(await letters.notes())) == (0, last)


async def test_every_stored_message_can_be_compared_with_the_record(context: Context, nats_url: str):
    async with byte_writer(nats_url) as raw:
        await raw.publish(context.subject, odd_messages())
    for sequence in range(1, await last_sequence(context) + 1):
        assert await message_id_at(context.js, context.events, sequence) is not None


async def test_an_advisory_that_cannot_be_read_is_skipped(context: Context, nats_url: str):
    heard = asyncio.Event()
    audit = Audit(heard.set)
    async with byte_writer(nats_url) as raw:
        await context.connection.subscribe(ADVISORIES, cb=audit.hear)
        await context.connection.flush()
        await raw.publish(ADVISORIES, [*odd_messages(), *random_messages(200, seed=6)])
        await context.js.purge_stream(context.events)
        async with asyncio.timeout(10):
            await heard.wait()
    assert audit.take(context.events)


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.soak
@pytest.mark.usefixtures("traced")
async def test_ten_thousand_random_messages_stop_no_consumer_and_leave_no_memory(context: Context, nats_url: str):
    script = Script()
    sizes = []
    for seed in range(10):  # each with what is left of a consumer, and of a log that is kept
        with quiet_logs():
            async with context.consuming(script) as consumer, byte_writer(nats_url) as raw:
                before = await last_sequence(context)
                await raw.publish(context.subject, random_messages(1000, seed=seed))
                await context.settled()
                handled = consumer.counters.done + consumer.counters.dead_lettered
                assert handled == await last_sequence(context) - before
        script.seen.clear()
        gc.collect()
        sizes.append(tracemalloc.get_traced_memory()[0])
    print(f"bytes in use after each thousand: {sizes}")  # noqa: T201
    assert max(sizes[2:]) < sizes[1] + 1_000_000
