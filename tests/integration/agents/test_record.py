"""What JetStream loses of an agent's messages is published again from its store, and what is there is left alone."""

import asyncio
import shutil
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from support.agents import SETTINGS, Counting, Running, Tally, emitted, kept, place_orders, running_agent, settled
from support.jetstream import Context
from support.waiting import until, until_so

from embedded import EmbeddedNats
from postroom.agent import EPOCH, Command, Envelope
from postroom.delivery.agents.outgoing import AgentPublisher
from postroom.delivery.agents.replay import verify
from postroom.delivery.agents.store import QUERIES, Mark, Owner, Store
from postroom.delivery.nats import connect
from postroom.delivery.publication import Outgoing, Search
from postroom.delivery.publication.link import Link
from postroom.delivery.settings import NatsSettings
from postroom.delivery.streams import ensure_stream

ORDERS = [f"order-{number}" for number in range(20)]
RECORD = msgspec.structs.replace(SETTINGS, check_seconds=0.05)
RARELY = msgspec.structs.replace(SETTINGS, check_seconds=3600)


async def all_there(context: Context, directory: Path, epoch: str) -> None:
    """Return when the stream has every emitted message under an id of this epoch, each once."""
    wanted = {event.envelope.id + epoch: 1 for event in kept(directory) if event.role == "emitted"}

    async def there() -> bool:
        return await emitted(context) == wanted

    await until_so(there, "everything that was emitted is in the stream once")


async def compared(running: Running, times: int = 3) -> None:
    """Return when the record has compared so many times more."""
    record = running.runtime.publisher.record
    before = record.comparisons

    async def done() -> bool:
        return record.comparisons >= before + times

    await until_so(done, "the record has compared")


async def test_what_was_purged_is_published_again_under_a_fresh_id(context: Context, tmp_path: Path):
    await place_orders(context, ORDERS)
    async with running_agent(context, tmp_path, settings=RECORD) as running:
        await settled(context)
        await context.js.purge_stream(context.events)
        await all_there(context, tmp_path, "/1")
        assert running.runtime.counters.lost == 2 * len(ORDERS)
        messages = await context.stored(context.events)
        assert {message.headers["Idempotency-Key"] + "/1" for message in messages if message.headers} == {
            message.headers["Nats-Msg-Id"] for message in messages if message.headers
        }
        await context.js.purge_stream(context.events)
        await all_there(context, tmp_path, "/2")


async def test_what_is_there_is_not_published_again(context: Context, tmp_path: Path):
    await place_orders(context, ORDERS)
    async with running_agent(context, tmp_path, settings=RECORD) as running:
        await settled(context)
        await compared(running)
        await context.js.purge_stream(context.events, keep=10)
        lost = 2 * len(ORDERS) - 10

        async def the_rest_is_back() -> bool:
            return len(await emitted(context)) == 2 * len(ORDERS)

        await until_so(the_rest_is_back, "what was purged is back")
        await compared(running)
        assert running.runtime.counters.lost == lost
        assert set((await emitted(context)).values()) == {1}


async def test_what_a_deleted_stream_had_is_published_into_the_new_one(context: Context, tmp_path: Path):
    await place_orders(context, ORDERS)
    async with running_agent(context, tmp_path, settings=RECORD) as running:
        await settled(context)
        await compared(running)  # it has seen the stream that will be gone
        await context.js.delete_stream(context.events)
        await ensure_stream(context.js, context.streams[0])
        await all_there(context, tmp_path, "/1")
        await compared(running)
        await all_there(context, tmp_path, "/1")


async def test_what_was_lost_while_the_agent_was_away_is_published_at_its_start(context: Context, tmp_path: Path):
    await place_orders(context, ORDERS)
    async with running_agent(context, tmp_path):
        await settled(context)
    await context.js.purge_stream(context.events)
    async with running_agent(context, tmp_path, settings=RARELY):
        await all_there(context, tmp_path, "/1")


class Ordering(Counting):
    """Gives each order to a worker."""

    name = "ordering"

    async def receive(self, envelope: Envelope) -> list[Command]:
        return [Command("packing", payload={"order": envelope.id})]


async def test_commands_that_were_done_are_not_published_again_with_a_queue_that_was_lost(
    context: Context, tmp_path: Path
):
    """Also where one before them waits still, and others have their numbers now."""
    commands = next(stream for stream in context.streams if stream.name.endswith("_COMMANDS"))
    await place_orders(context, ORDERS)
    async with running_agent(context, tmp_path, Ordering, settings=RECORD) as running:
        await settled(context, "ordering_consumer")
        await context.js.add_consumer(commands.name, durable_name="packer", ack_policy="explicit")
        packer = await context.js.pull_subscribe_bind(durable="packer", stream=commands.name)
        waiting, *done = await packer.fetch(len(ORDERS), timeout=5)
        await asyncio.gather(*(message.ack_sync() for message in done))
        await compared(running)

        await context.js.delete_stream(commands.name)
        await ensure_stream(context.js, commands)
        later = [f"later-{number}" for number in range(len(ORDERS))]
        await place_orders(context, later)
        await settled(context, "ordering_consumer")
        await compared(running)
        ids = Counter((message.headers or {})["Nats-Msg-Id"] for message in await context.stored(commands.name))
        assert running.runtime.counters.lost == 1
    again = f"{waiting.headers['Nats-Msg-Id']}/1"
    assert (ids[again], len(ids), set(ids.values())) == (1, 1 + len(later), {1})


async def test_the_letters_that_a_stream_lost_are_published_again(context: Context, tmp_path: Path):
    for message_id in ("bad-1", "bad-2"):
        headers = {"Nats-Msg-Id": message_id}
        await context.js.publish(context.subject, b'{"total":2,"poison":true}', headers=headers)

    async def letters() -> list[str]:
        return sorted((message.headers or {})["Nats-Msg-Id"] for message in await context.stored(context.dlq))

    async def again() -> bool:
        return await letters() == [f"dead:counting_consumer:bad-{number}/1" for number in (1, 2)]

    async with running_agent(context, tmp_path, settings=RECORD, max_deliver=1):
        await settled(context)
        assert await letters() == [f"dead:counting_consumer:bad-{number}" for number in (1, 2)]
        await context.js.delete_stream(context.dlq)
        await ensure_stream(context.js, next(stream for stream in context.streams if stream.name == context.dlq))
        await until_so(again, "the letters are back")
    async with running_agent(context, tmp_path, settings=msgspec.structs.replace(RECORD, keep_days=1e-9)):
        await until_so(lambda: forgotten(tmp_path), "letters of long ago are forgotten")


async def test_a_letter_is_published_when_its_stream_is_there_again(context: Context, tmp_path: Path):
    await context.js.delete_stream(context.dlq)
    await context.js.publish(context.subject, b'{"poison":true}', headers={"Nats-Msg-Id": "bad"})
    async with running_agent(context, tmp_path, settings=RECORD, max_deliver=1):
        await settled(context)  # the message is not held up by it
        await ensure_stream(context.js, next(stream for stream in context.streams if stream.name == context.dlq))

        async def there() -> bool:
            return [letter.message_id for letter in await context.letters()] == ["bad"]

        await until_so(there, "the letter is published")


async def test_a_letter_larger_than_nats_takes_is_published_without_its_payload(context: Context, tmp_path: Path):
    body = msgspec.json.encode({"poison": True, "padding": '"' * (context.connection.max_payload // 2 - 1000)})
    await context.js.publish(context.subject, body, headers={"Nats-Msg-Id": "bad"})
    async with running_agent(context, tmp_path, settings=RECORD, max_deliver=1):
        await settled(context)
        (letter,) = await context.letters()
    assert (letter.message_id, letter.has_payload, letter.payload_omitted) == ("bad", False, True)


async def test_what_is_older_than_the_horizon_stays_lost(context: Context, tmp_path: Path):
    settings = msgspec.structs.replace(RECORD, horizon_days=1e-9)
    await place_orders(context, ORDERS)
    async with running_agent(context, tmp_path, settings=settings) as running:
        await settled(context)
        await context.js.purge_stream(context.events)
        await compared(running)
        assert await emitted(context) == Counter()
        assert running.runtime.counters.lost == 0


@asynccontextmanager
async def serving(directory: Path, name: str) -> AsyncIterator[Context]:
    """Run a server over a directory for the length of the block."""
    server = EmbeddedNats(directory)
    server.start()
    connection = await connect(NatsSettings(url=server.url), name="test", patience=20)
    try:
        context = Context(connection, name)
        await context.declare()
        yield context
    finally:
        await connection.close()
        server.stop()


@pytest.mark.parametrize("others", [0, 60])
async def test_what_a_server_lost_with_its_newest_is_published_again(
    short_directory: Path, tmp_path: Path, others: int
):
    """`others` have published meanwhile: the numbers that were lost are taken again."""
    data, saved = short_directory / "nats", short_directory / "saved"
    for orders in (ORDERS[:5], ORDERS[5:10]):
        async with serving(data, "shop") as context, running_agent(context, tmp_path, settings=RARELY):
            await place_orders(context, orders)
            await settled(context)
        if not saved.exists():
            shutil.copytree(data, saved)
    shutil.rmtree(data)
    saved.rename(data)
    async with serving(data, "shop") as context:
        await place_orders(context, [f"{order}/1" for order in ORDERS[5:10]])  # as the worker's record does
        await context.publish([f"other-{number}" for number in range(others)], subject="shop.event.other.v1")
        async with running_agent(context, tmp_path, settings=RECORD) as running:
            await settled(context)

            async def all_are_there() -> bool:
                return {message_id.partition("/")[0] for message_id in await emitted(context)} == {
                    event.envelope.id for event in kept(tmp_path) if event.role == "emitted"
                }

            await until_so(all_are_there, "everything that was emitted is in the stream")
            await compared(running)
            assert running.runtime.state == Tally(10, 20)
            counts = await emitted(context)
            assert (len(counts), set(counts.values())) == (20, {1})


async def test_of_two_messages_with_one_number_of_a_stream_both_are_published_again(context: Context, tmp_path: Path):
    """One was lost in a power cut, perhaps the one that is marked last: its process was stopped meanwhile."""
    await place_orders(context, ORDERS[:1])
    async with running_agent(context, tmp_path):
        await settled(context)
    store = await Store.open(tmp_path / "events.db", Owner("counting", context.name, "default"))
    assert await store.requeue_since(0, now=1, actor="olga", reason="a test") == 2
    first, second = [message.position for message in await store.lost(0, 10)]
    assert await store.mark_published([Mark(first, 1, 1, context.events, 1, 7)]) == 0
    assert await store.mark_published([Mark(second, 1, 1, context.events, 1, 7)]) == 2
    assert [message.position for message in await store.lost(0, 10)] == [first, second]
    await store.close()

    await context.js.purge_stream(context.events)  # what was published before is not of interest
    async with running_agent(context, tmp_path):
        await all_there(context, tmp_path, "/2")


@pytest.mark.parametrize(("later", "lost"), [(0, 0), (1, 2)])
async def test_what_was_published_in_the_millisecond_of_the_look_may_be_behind_it(
    context: Context, tmp_path: Path, later: int, lost: int
):
    await place_orders(context, ORDERS[:1])
    async with running_agent(context, tmp_path):
        await settled(context)
    store = await Store.open(tmp_path / "events.db", Owner("counting", context.name, "default"))
    await store.requeue_since(0, now=1, actor="olga", reason="a test")
    for sequence, message in enumerate(await store.lost(0, 10), start=8):
        await store.mark_published([Mark(message.position, 1, 1_000, context.events, 1, sequence)])
    created, look = EPOCH + timedelta(microseconds=1), EPOCH + timedelta(milliseconds=1_000 + later)
    assert await store.requeue_lost(Search("behind_the_end", context.events, created, 7, EPOCH, look)) == lost
    await store.close()


async def test_two_messages_with_one_number_in_two_streams_of_one_name_are_both_there(context: Context, tmp_path: Path):
    await place_orders(context, ORDERS[:1])
    async with running_agent(context, tmp_path) as running:
        await until(lambda: running.runtime.counters.published == 2)
    store = await Store.open(tmp_path / "events.db", Owner("counting", context.name, "default"))
    await store.requeue_since(0, now=1, actor="olga", reason="a test")
    first, second = [message.position for message in await store.lost(0, 10)]
    assert await store.mark_published([Mark(first, 1, 1, context.events, 1, 7)]) == 0
    assert await store.mark_published([Mark(second, 1, 1, context.events, 2, 7)]) == 0
    assert await store.lost(0, 10) == []
    await store.close()


async def test_commands_that_were_done_before_they_were_marked_are_not_published_again(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The process was killed between the server's word and its mark."""
    commands = next(stream for stream in context.streams if stream.name.endswith("_COMMANDS"))
    await place_orders(context, ORDERS)

    async def mark_nothing(*_: object) -> int:
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(Store, "mark_published", mark_nothing)
        async with running_agent(context, tmp_path, Ordering, settings=RECORD):
            await settled(context, "ordering_consumer")
    await context.js.purge_stream(commands.name)  # the same as acknowledging all of them
    async with running_agent(context, tmp_path, Ordering, settings=RECORD) as running:
        await compared(running)
        assert running.runtime.counters.lost == 0
    assert await context.stored(commands.name) == []


async def test_what_was_published_long_ago_is_forgotten_and_its_message_still_known(context: Context, tmp_path: Path):
    await place_orders(context, ORDERS)
    async with running_agent(context, tmp_path, settings=RECORD) as running:
        await settled(context)
        await compared(running)
    assert noted(tmp_path) == 2 * len(ORDERS)

    async with running_agent(context, tmp_path, settings=msgspec.structs.replace(RECORD, keep_days=1e-9)) as running:
        await until_so(lambda: forgotten(tmp_path), "all is forgotten")
        again = {"Nats-Msg-Id": f"{ORDERS[0]}/1", "Postroom-Epoch": "1"}
        await context.js.publish(context.subject, b'{"total":2}', headers=again)
        await settled(context)
        await compared(running)
        assert (running.runtime.counters.found, running.runtime.counters.lost) == (1, 0)
    assert len(await emitted(context)) == 2 * len(ORDERS)
    assert (await verify(tmp_path / "events.db")).first_difference is None


async def test_an_agent_stops_though_its_comparison_swallows_the_cancellation(context: Context, tmp_path: Path):
    begun = asyncio.Event()

    async def compare(_link: Link) -> int:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        return 0

    async with asyncio.timeout(20), running_agent(context, tmp_path, settings=RECORD) as running:
        running.runtime.publisher.record.compare = compare  # type: ignore[method-assign]
        await begun.wait()


async def test_an_agent_stops_though_its_publishing_swallows_the_cancellation(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    begun = asyncio.Event()

    async def publish(_: AgentPublisher, messages: Sequence[Outgoing]) -> Sequence[Outgoing]:
        if messages and not begun.is_set():
            begun.set()
            with suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
        return messages

    monkeypatch.setattr(AgentPublisher, "_publish", publish)
    await place_orders(context, ORDERS[:1])
    async with asyncio.timeout(20), running_agent(context, tmp_path):
        await begun.wait()


def noted(directory: Path) -> int:
    with closing(sqlite3.connect(directory / "events.db")) as db:
        return int(db.execute("SELECT count(*) FROM outgoing").fetchone()[0])


async def forgotten(directory: Path) -> bool:
    return noted(directory) == 0


@pytest.mark.parametrize(("given", "passed_on"), [("00", "00"), ("02", "00"), ("01", "01"), ("03", "01")])
async def test_a_message_is_as_sampled_as_its_cause_also_when_it_is_published_again(
    context: Context, tmp_path: Path, given: str, passed_on: str
):
    await place_orders(context, ["order-1"], traceparent=f"00-{'a' * 32}-{'b' * 16}-{given}")
    async with running_agent(context, tmp_path, settings=RECORD):
        await settled(context)
        first = {(message.headers or {})["traceparent"] for message in (await context.stored(context.events))[1:]}
        await context.js.purge_stream(context.events)
        await all_there(context, tmp_path, "/1")
        again = {(message.headers or {})["traceparent"] for message in await context.stored(context.events)}
    assert first == again
    assert {traceparent[-2:] for traceparent in first} == {passed_on}


async def test_a_comparison_reads_what_may_be_lost_and_not_all_that_is_kept(tmp_path: Path):
    await (await Store.open(tmp_path / "events.db", Owner("counting", "sea", "default"))).close()
    search = {"stream": "SEA_EVENTS", "created_at": 1, "number": 1, "until": 1}
    searches = [(f"find_{loss}", search) for loss in ("of_another_stream", "behind_the_end", "before_the_beginning")]
    with closing(sqlite3.connect(tmp_path / "events.db")) as db:
        for name, values in [*searches, ("lost", (0, 1)), ("unpublished", ())]:
            plan = [row[3] for row in db.execute(f"EXPLAIN QUERY PLAN {QUERIES[name]}", values)]
            reads = [line for line in plan if "outgoing USING" in line]
            assert reads, (name, plan)
            assert all("outgoing_unpublished" in line or "stream_created_at" in line for line in reads), (name, plan)
