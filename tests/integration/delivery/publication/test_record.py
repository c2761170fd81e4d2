"""Postgres is the record: whatever a stream loses is published again, until its consumers have it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from support.waiting import until, until_so

from embedded import EmbeddedNats
from postroom._wire.dead_letters import DeadLetter
from postroom._wire.unpublished import PublishedFilter
from postroom.chassis.clock import now
from postroom.delivery.dead_letters import RecordedLetters
from postroom.delivery.publication import postgres
from postroom.delivery.publication.link import Link
from postroom.delivery.publication.postgres import EVENTS, redrive
from postroom.delivery.publication.record import ConsumerFloors, Record
from postroom.delivery.settings import NatsSettings, RecordSettings
from postroom.errors import NotFound

DEAD = """
INSERT INTO postroom.inbox_messages (consumer, source_context, message_id, subject, dead_at, dead_reason)
VALUES ($3, $1, $2, 'any', now(), 'poison')
"""


async def publish(office: Any, running: Any, events: int, *, aggregates: int = 10) -> None:
    publisher = office.publisher()
    async with running(publisher):
        await office.emit_many(events, aggregates)
        await asyncio.wait_for(office.drained(), 60)


def identities(ids: list[str]) -> Counter[str]:
    return Counter(identity.partition("/")[0] for identity in ids)


async def recorded(office: Any) -> set[str]:
    return {row[0] for row in await office.pool.fetch("SELECT id::text FROM postroom.outbox_events")}


async def test_a_stream_that_is_as_it_was_has_lost_nothing(office: Any, running: Any) -> None:
    await office.add_stream()
    await publish(office, running, 50)
    assert await office.compare(office.record()) == 0


async def test_a_deleted_stream_is_filled_again_under_fresh_ids(office: Any, running: Any) -> None:
    await office.add_stream()
    await publish(office, running, 500)
    await office.js.delete_stream(office.stream)
    await office.add_stream()
    await publish(office, running, 10)  # in its place there are new ones, with the numbers of the old

    ids = await office.ids()
    assert identities(ids) == Counter(await recorded(office))
    assert sum(identity.endswith("/1") for identity in ids) == 500


async def test_what_goes_into_a_stream_made_anew_before_the_publisher_looks_again_is_not_lost(office: Any) -> None:
    await office.add_stream()
    publisher = office.publisher()
    await office.emit()
    await drain(publisher)
    await office.js.delete_stream(office.stream)
    await office.add_stream()
    await office.emit()
    await drain(publisher)
    await publisher.stop()
    assert await office.compare(office.record()) == 0
    assert await epochs(office) == [1, 0]


async def test_what_a_stream_has_that_was_made_anew_behind_the_look_is_not_lost(office: Any, running: Any) -> None:
    await office.add_stream()
    await publish(office, running, 5)
    source = office.source()

    async def made_anew() -> bool:
        source.all_marked = all_marked
        await office.js.delete_stream(office.stream)
        await office.add_stream()
        await publish(office, running, 3)
        return bool(await all_marked())

    all_marked, source.all_marked = source.all_marked, made_anew
    record = Record([source], RecordSettings())
    assert [await office.compare(record) for _ in range(3)] == [0, 0, 0]
    assert sorted(identity[36:] for identity in await office.ids()) == [*[""] * 3, *["/1"] * 5]


async def test_a_stream_that_is_made_anew_amid_a_comparison_is_compared_with_the_next_time(
    office: Any, running: Any
) -> None:
    await office.add_stream()
    await publish(office, running, 2)
    source = office.source()

    async def remade(*place: Any) -> Any:
        source.newest_at = newest_at
        await office.js.delete_stream(office.stream)
        await office.add_stream()
        return await newest_at(*place)

    newest_at, source.newest_at = source.newest_at, remade
    record = Record([source], RecordSettings())
    async with asyncio.timeout(60):
        assert [await office.compare(record) for _ in range(2)] == [0, 2]


async def test_a_purged_stream_is_filled_again_but_for_what_a_consumer_has_handled(office: Any, running: Any) -> None:
    await office.add_stream()
    await publish(office, running, 100)
    handled = (await office.ids())[:40]
    waiting = (await office.ids())[40]
    record = office.record()
    assert await office.compare(record) == 0
    await receive(office, handled, "now()")
    await receive(office, [waiting], "NULL")
    await office.js.purge_stream(office.stream)

    assert await office.compare(record) == 60
    await publish(office, running, 0)
    assert identities(await office.ids()) == Counter(await recorded(office) - set(handled))


async def test_what_a_webhook_got_is_published_again_for_those_that_it_is_really_for(office: Any, running: Any) -> None:
    await office.add_stream()
    await publish(office, running, 10)
    by_both, by_webhook, waiting = (await office.ids())[:3]
    await receive(office, [by_both, waiting], "now()")
    await receive(office, [by_both, by_webhook], "now()", "webhook__one")
    await receive(office, [waiting], "NULL", "webhook__one")
    assert await office.compare(record := office.record()) == 0
    await office.js.purge_stream(office.stream)
    assert await office.compare(record) == 9


async def test_one_loss_after_the_other_takes_nothing_from_a_consumer_that_is_behind_until_it_is_deleted(
    office: Any, running: Any
) -> None:
    await office.add_stream()
    await office.js.add_consumer(office.stream, durable_name="slow", ack_policy="explicit")
    await publish(office, running, 10)
    await receive(office, await office.ids(), "now()")
    record = office.record()
    await look(office, record)
    for _ in range(2):  # the second time before anybody has looked at the consumers of the new stream
        await office.js.delete_stream(office.stream)
        await office.add_stream()
        assert await office.compare(record) == 10
        await publish(office, running, 0)

    await office.js.add_consumer(office.stream, durable_name="slow", ack_policy="explicit")
    slow = await office.js.pull_subscribe_bind("slow", office.stream)
    for message in await slow.fetch(4):
        await message.ack_sync()
    await look(office, record)
    await office.js.purge_stream(office.stream)  # after which it says that it has all
    await look(office, record, lost=6)
    await publish(office, running, 0)
    await office.js.delete_consumer(office.stream, "slow")
    await look(office, record)
    await office.js.delete_stream(office.stream)
    await office.add_stream()
    assert await office.compare(record) == 0


async def look(office: Any, record: Any, *, lost: int = 0) -> None:
    """Do what a worker's round does."""
    link = await Link.open(NatsSettings(url=office.nats_url), name="test", ack_seconds=5)
    try:
        floors = ConsumerFloors(office.pool, record)
        await floors.read(link)
        assert await record.compare(link) == lost
        await floors.note(link)
    finally:
        await link.close()


@pytest.mark.parametrize("consumer", ["someone", "s" * 64])
async def test_what_a_consumer_could_not_handle_is_published_again_until_its_letter_is_kept(
    office: Any, running: Any, consumer: str
) -> None:
    await office.add_stream()
    await publish(office, running, 10)
    kept, unkept = [*(await office.ids())[:1], "m" * 255], (await office.ids())[1]
    await office.pool.executemany(DEAD, [(office.context, identity, consumer) for identity in (*kept, unkept)])
    for message_id in kept:
        letter = DeadLetter(
            message_id=message_id, original_subject="any", reason="poison", attempts=1, consumer=consumer
        )
        await RecordedLetters(office.pool, "another_mesh").keep(letter.with_data(b"{}"))
    is_confirmed = "SELECT postroom.is_confirmed($1, $2 || '.event.any.v1')"
    confirmed = [await office.pool.fetchval(is_confirmed, each, office.context) for each in (*kept, unkept)]
    assert confirmed == [True, True, False]
    assert await office.compare(record := office.record()) == 0
    await office.js.purge_stream(office.stream)
    assert await office.compare(record) == 9


async def test_the_newest_messages_that_a_server_forgot_are_published_again(office: Any, running: Any) -> None:
    """A power cut takes the end of a stream: its last number is smaller than what was given out."""
    await office.add_stream()
    await publish(office, running, 20)
    lost = await office.pool.fetch(
        "UPDATE postroom.outbox_events SET stream_sequence = stream_sequence + 15 WHERE stream_sequence > 15 "
        "RETURNING id::text"
    )
    assert await office.compare(office.record()) == 5
    await publish(office, running, 0)
    again = [identity for identity in await office.ids() if identity.endswith("/1")]
    assert {identity.removesuffix("/1") for identity in again} == {row[0] for row in lost}


async def test_of_a_number_given_away_a_second_time_both_are_published_again(office: Any) -> None:
    """Between the power cut and the look at the stream, others took the numbers of what was lost."""
    await office.add_stream()
    await give_the_fifth_number_away(office, confirmed=False)
    assert await epochs(office) == [0, 0, 0, 0, 1, 1]
    assert sorted(identities(await office.ids()).values()) == [1, 1, 1, 1, 2, 2]


async def test_what_was_confirmed_stays_where_it_was_when_its_number_is_given_away(office: Any) -> None:
    await office.add_stream()
    await give_the_fifth_number_away(office, confirmed=True)
    assert await epochs(office) == [0, 0, 0, 0, 0, 1]


async def give_the_fifth_number_away(office: Any, *, confirmed: bool) -> None:
    """Publish five events and one more, of which the stream says that it has the number of the fifth."""
    await office.emit_many(5)
    await drain(publisher := office.publisher())
    if confirmed:
        await receive(office, (await office.ids())[-1:], "now()")
    await office.pool.execute("UPDATE postroom.outbox_events SET stream_sequence = 6 WHERE stream_sequence = 5")
    await office.emit("fresh")
    await drain(publisher)
    await publisher.stop()


async def drain(publisher: Any) -> None:
    while await publisher.step():
        pass


async def epochs(office: Any) -> list[int]:
    return [row[0] for row in await office.pool.fetch("SELECT epoch FROM postroom.outbox_events ORDER BY position")]


async def test_what_age_took_out_of_a_stream_is_not_lost(office: Any, running: Any) -> None:
    await office.add_stream(max_age=3600)
    await publish(office, running, 5)
    await office.js.purge_stream(office.stream)
    await office.pool.execute("UPDATE postroom.outbox_events SET published_at = now() - interval '1 hour'")
    assert await office.compare(office.record()) == 0


@pytest.mark.parametrize("search", ["find_behind_the_end", "find_before_the_beginning", "find_of_another_stream"])
async def test_a_step_of_a_search_examines_so_many_messages_also_of_those_that_are_handled(
    office: Any, running: Any, search: str
) -> None:
    await office.add_stream()
    await publish(office, running, 25)
    await receive(office, await office.ids(), "now()")
    anywhere: dict[str, Any] = {"find_behind_the_end": 0, "find_before_the_beginning": 26}
    moment = await now(office.pool)
    bound = anywhere.get(search, moment)
    values = office.stream, bound, moment - timedelta(hours=1), moment, 10, 0, moment
    (plan,) = json.loads(
        await office.pool.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {EVENTS.queries[search]}", *values)
    )

    def nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
        return [node, *(each for child in node.get("Plans", []) for each in nodes(child))]

    assert max(node.get("Rows Removed by Filter", 0) for node in nodes(plan["Plan"])) == 0
    assert plan["Plan"]["Actual Rows"] == 10


async def test_a_search_finds_what_is_lost_behind_more_that_is_handled_than_a_step_examines(
    office: Any, running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_STEP", 10)
    await office.add_stream()
    await publish(office, running, 35)
    await receive(office, (await office.ids())[:23], "now()")
    await office.js.delete_stream(office.stream)
    await office.add_stream()
    assert await office.compare(office.record()) == 12


async def test_what_a_full_stream_pushed_out_is_not_lost(office: Any, running: Any) -> None:
    await office.add_stream(max_msgs=10)
    await publish(office, running, 30)
    assert await office.compare(office.record()) == 0


async def test_redriving_by_hand_counts_first_and_then_publishes_again(office: Any, running: Any) -> None:
    await office.add_stream()
    await publish(office, running, 30)
    between = datetime.now(UTC)
    await publish(office, running, 12)
    handled = (await office.ids())[-2:]
    await receive(office, handled, "now()")

    async def drive(*, since: datetime, dry_run: bool = False, **wanted: Any) -> int:
        async with office.pool.acquire() as connection, connection.transaction():
            meant, until = PublishedFilter(since=since, **wanted), await now(connection)
            (one,), _ = await redrive(connection, meant, until=until, dry_run=dry_run, tables=[EVENTS])
        return one.messages

    assert await drive(since=between, dry_run=True) == 10
    assert await drive(since=between, dry_run=True, confirmed=True) == 12
    with pytest.raises(NotFound, match="nothing is recorded as published into a stream 'ANOTHER'"):
        await drive(since=between, dry_run=True, stream="ANOTHER")
    await office.pool.execute("UPDATE postroom.outbox_events SET stream = 'ANOTHER' WHERE published_at < $1", between)
    assert await drive(since=between, dry_run=True, stream="ANOTHER") == 0
    assert await drive(since=between + timedelta(hours=1)) == 0
    assert await office.unpublished() == 0
    assert await drive(since=between) == 10
    assert await office.unpublished() == 10
    await publish(office, running, 0)
    assert sum(identity.endswith("/1") for identity in await office.ids()) == 10


@pytest.mark.parametrize("dry_run", [True, False])
async def test_a_redrive_examines_so_many_messages_at_a_time_also_of_those_that_are_handled(
    office: Any, running: Any, monkeypatch: pytest.MonkeyPatch, *, dry_run: bool
) -> None:
    await office.add_stream()
    await publish(office, running, 25, aggregates=1)
    await receive(office, (await office.ids())[:20], "now()")
    monkeypatch.setattr(postgres, "_STEP", 10)
    meant, until = PublishedFilter(since=datetime.now(UTC) - timedelta(hours=1)), await now(office.pool)
    found, after = list[int](), meant.earliest(until)
    async with office.pool.acquire() as connection:
        while after is not None:
            (one,), after = await redrive(connection, meant, until=until, after=after, dry_run=dry_run, tables=[EVENTS])
            found.append(one.messages)
    assert found == [0, 0, 5]
    assert await office.unpublished() == (0 if dry_run else 5)


async def test_of_two_who_redrive_at_once_each_counts_what_it_has_done(office: Any, running: Any) -> None:
    await office.add_stream()
    await publish(office, running, 3)
    meant, until = PublishedFilter(since=datetime.now(UTC) - timedelta(hours=1)), await now(office.pool)

    async def drive(connection: Any) -> int:
        async with connection.transaction():
            (one,), _ = await redrive(connection, meant, until=until, tables=[EVENTS])
        return one.messages

    async with office.pool.acquire() as connection, office.pool.acquire() as another:
        async with connection.transaction():
            first = await drive(connection)
            second = asyncio.create_task(drive(another))
            blocked = "SELECT cardinality(pg_blocking_pids($1))"
            await until_so(lambda: office.pool.fetchval(blocked, another.get_server_pid()))
        assert (first, await second) == (3, 0)


@pytest.mark.parametrize("events", [1000, pytest.param(10_000, marks=pytest.mark.soak)])
async def test_every_event_is_rebuilt_after_the_store_of_nats_was_deleted(
    office: Any, running: Any, short_directory: Any, events: int
) -> None:
    import nats  # noqa: PLC0415 - for the test with a server of its own

    server = EmbeddedNats(short_directory / "nats")
    server.start()
    publisher = office.publisher(url=server.url)

    async def add_stream() -> None:
        client = await nats.connect(server.url)
        subjects = [f"{office.context}.event.>"]
        await client.jetstream().add_stream(name=office.stream, subjects=subjects, allow_atomic=True)
        await client.close()

    await add_stream()
    async with running(publisher):
        await office.emit_many(events, aggregates=7)
        await asyncio.wait_for(office.drained(), 60)
        server.stop()
        shutil.rmtree(server.directory / "jetstream")
        await office.emit_many(10)
        server.start()
        await add_stream()
        await until(lambda: publisher.counters.published >= 2 * events + 10)
    client = await nats.connect(server.url)
    info = await client.jetstream().stream_info(office.stream)
    assert info.state.messages == events + 10
    await client.close()
    server.stop()


async def receive(office: Any, ids: list[str], processed_at: str, consumer: str = "someone") -> None:
    await office.pool.executemany(
        "INSERT INTO postroom.inbox_messages (consumer, source_context, message_id, subject, processed_at) "  # noqa: S608
        f"VALUES ($3, $1, $2, 'any', {processed_at})",
        [(office.context, identity, consumer) for identity in ids],
    )
