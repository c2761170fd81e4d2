"""Events go from the outbox into their stream: once, in order, whatever stands in the way of some of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import defaultdict
from dataclasses import replace
from datetime import timedelta
from typing import Any

import asyncpg
import nats
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from support.jetstream import with_jetstream
from support.nats_users import NatsWithUsers
from support.traces import TRACE, attributes, parent_of
from support.waiting import until, until_so

from embedded import EmbeddedNats
from postroom.chassis.postgres import open_rooms
from postroom.delivery import ROOM
from postroom.delivery.publication.postgres import EVENTS, LETTERS, list_failing
from postroom.delivery.settings import PublisherSettings

UNMARK = (
    "UPDATE postroom.outbox_events SET published_at = NULL, stream = NULL, stream_created_at = NULL, "
    "stream_sequence = NULL"
)
SMALL = PublisherSettings(batch=7, aggregates=3, ack_seconds=2, first_seconds=0.01, most_seconds=0.05)


async def drain(publisher: Any) -> None:
    while await publisher.step():
        pass


async def test_an_event_is_published_with_its_headers_and_marked(office: Any) -> None:
    await office.add_stream()
    correlation = "5f0c9a3e-6f2b-4a57-9d55-0f3a3c1f7b11"
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    identity = await office.pool.fetchval(
        "SELECT postroom.emit($1, 'order', 'o-1', 'order_placed', '{\"n\": 1}', 3, $2, $2, $3)::text",
        office.context, correlation, trace,
    )  # fmt: skip
    publisher = office.publisher()
    await drain(publisher)
    await publisher.stop()

    (message,) = await office.messages()
    assert (message.subject, json.loads(message.data)) == (f"{office.context}.event.order_placed.v3", {"n": 1})
    occurred = message.headers.pop("X-Occurred-At")
    assert message.headers == {
        "Nats-Msg-Id": identity,
        "Postroom-Event-Type": "order_placed",
        "X-Event-Version": "3",
        "X-Correlation-Id": correlation,
        "X-Causation-Id": correlation,
        "traceparent": trace,
    }
    row = await office.pool.fetchrow("SELECT * FROM postroom.outbox_events")
    assert row["occurred_at"].isoformat() == occurred
    assert (row["publish_attempts"], row["publish_error"], row["stream"], row["stream_sequence"]) == (
        1, None, office.stream, 1,
    )  # fmt: skip


async def test_what_is_no_traceparent_is_not_published(office: Any) -> None:
    emit = "SELECT postroom.emit($1, 'order', 'o-1', 'order_placed', '{}', 1, NULL, NULL, $2)::text"
    await office.add_stream()
    for malformed in (TRACE.upper(), f"{TRACE}\n", "nonsense", ""):
        await office.pool.fetchval(emit, office.context, malformed)
    publisher = office.publisher()
    await drain(publisher)
    await publisher.stop()
    assert [message.headers.get("traceparent") for message in await office.messages()] == [None] * 4


async def test_a_publish_of_a_message_with_a_trace_is_a_span(office: Any, recorded: InMemorySpanExporter) -> None:
    emit = "SELECT postroom.emit($1, 'order', $2, $3, '{}', 1, NULL, NULL, $4)::text"
    await office.add_stream()
    ids = [
        await office.pool.fetchval(emit, context, f"o-{number}", "order_placed", traceparent)
        for number, (context, traceparent) in enumerate(
            ((office.context, TRACE), ("nowhere", TRACE), (office.context, None))
        )
    ]
    publisher = office.publisher()
    await drain(publisher)
    await publisher.stop()

    published, refused, *_ = recorded.get_finished_spans()
    assert published.name == f"publish {office.context}.event.order_placed.v1"
    assert refused.name == "publish nowhere.event.order_placed.v1"
    assert [attributes(span)["messaging.message.id"] for span in (published, refused)] == ids[:2]
    assert {parent_of(span) for span in (published, refused)} == {TRACE}
    assert published.status.status_code is StatusCode.UNSET
    assert (refused.status.status_code, attributes(refused)["error.type"]) == (StatusCode.ERROR, "not_published")


async def test_a_mark_waits_for_no_disk_and_whatever_comes_after_it_does(office: Any, database_url: str) -> None:
    pool = await open_rooms(
        database_url, ROOM, name="test", connections=1, settings={"synchronous_commit": "on", "plan_cache_mode": "auto"}
    )
    await office.add_stream()
    await pool.execute(
        "CREATE TABLE seen (operation text, waits text, plans text);"
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO seen"
        "  VALUES (TG_OP, current_setting('synchronous_commit'), current_setting('plan_cache_mode')); RETURN NULL;"
        " END $$;"
        "CREATE TRIGGER see AFTER INSERT OR UPDATE ON postroom.outbox_events FOR EACH ROW EXECUTE FUNCTION see()"
    )
    its = replace(office, pool=pool)
    publisher = its.publisher()
    for _ in range(2):
        await its.emit()
        await drain(publisher)
    await publisher.stop()
    seen = await pool.fetch("SELECT * FROM seen")
    await pool.close()
    assert [tuple(row) for row in seen] == [("INSERT", "on", "auto"), ("UPDATE", "off", "force_generic_plan")] * 2


async def test_every_event_is_there_once_and_in_its_aggregates_order_with_many_publishers(
    office: Any, running: Any
) -> None:
    await office.add_stream()
    async with running(*(office.publisher(SMALL) for _ in range(4))):
        for _ in range(5):
            await office.emit_many(200, aggregates=20)
        await asyncio.wait_for(office.drained(), 60)

    order = await office.pool.fetch("SELECT id::text, aggregate_id FROM postroom.outbox_events ORDER BY position")
    expected, found = defaultdict(list), defaultdict(list)
    for identity, aggregate in order:
        expected[aggregate].append(identity)
    aggregate_of = dict(map(tuple, order))
    for identity in await office.ids():
        found[aggregate_of[identity]].append(identity)
    assert found == expected


async def test_an_aggregate_that_one_publisher_holds_is_left_alone_by_another(office: Any) -> None:
    await office.add_stream()
    await office.emit_many(4, aggregates=2)
    first, second = office.publisher(), office.publisher()
    async with office.source().claim(PublisherSettings(aggregates=1)) as claim:
        assert {message.aggregate for message in claim.messages} == {"order-0"}
        await drain(second)
        assert {json.loads(message.data)["n"] % 2 for message in await office.messages()} == {1}
    await drain(first)
    assert len(await office.ids()) == 4
    await asyncio.gather(first.stop(), second.stop())


async def test_a_publisher_that_stands_still_is_ended_by_postgres_and_its_events_go_on(office: Any) -> None:
    await office.add_stream()
    await office.emit_many(2)
    second = office.publisher()
    held, still = "SHOW idle_in_transaction_session_timeout", "SET idle_in_transaction_session_timeout = '50ms'"
    with pytest.raises(asyncpg.InterfaceError):  # noqa: PT012 - the end of the claim raises
        async with office.source().claim(PublisherSettings()) as claim:
            assert len(claim.messages) == 2
            assert await claim._connection.fetchval(held) == "1min"
            await claim._connection.execute(still)
            await until_so(second.step)
    assert len(await office.ids()) == 2
    await second.stop()


async def test_a_look_where_nothing_waits_begins_no_transaction_and_the_next_finds_what_came(office: Any) -> None:
    await office.add_stream()
    publisher, asked = office.publisher(), list[str]()
    moved = [await publisher.step()]
    async with office.pool.acquire() as connection:  # the next to ask has the same one
        connection.add_query_logger(lambda query: asked.append(query.query))
    moved.append(await publisher.step())
    begun = [query for query in asked if "BEGIN" in query]
    await office.emit()
    moved.append(await publisher.step())
    await publisher.stop()
    assert moved == [0, 0, 1]
    assert begun == []
    assert any("BEGIN" in query for query in asked)


async def test_an_event_without_a_stream_holds_up_its_own_aggregate_and_no_other(office: Any, running: Any) -> None:
    await office.add_stream()
    before = await office.emit("a")
    poison = await office.pool.fetchval("SELECT postroom.emit('nobody', 'order', 'a', 'lost', '{}')::text")
    behind = await office.emit("a")
    others = [await office.emit(f"b{n}") for n in range(20)]
    publisher = office.publisher()
    async with running(publisher):
        await until_so(office.unpublished, holds=lambda left: left <= 2)
        await until_so(lambda: failure(office, poison), holds=lambda failed: failed["publish_attempts"] > 1)
        assert set(await office.ids()) == {before, *others}
        assert "no stream has the subject nobody.event.lost.v1" in (await failure(office, poison))["publish_error"]

        stream = f"{office.stream}_MORE"
        await office.js.add_stream(name=stream, subjects=["nobody.event.>"])
        await asyncio.wait_for(office.drained(), 30)
    assert (await office.ids())[-1] == behind
    assert [message.headers["Nats-Msg-Id"] for message in await office.messages(stream)] == [poison]


async def test_an_event_above_the_servers_limit_is_kept_with_the_reason_and_holds_up_no_other(office: Any) -> None:
    await office.add_stream()
    large = await office.emit("a", payload=json.dumps({"text": "x" * 8_400_000}))
    small = await office.emit("b")
    publisher = office.publisher()
    await drain(publisher)
    await publisher.stop()

    assert await office.ids() == [small]
    assert "raise its max_payload" in (await failure(office, large))["publish_error"]
    backlog = await office.source().backlog(office.context)
    assert (backlog.count, backlog.failing, backlog.oldest_at is not None) == (1, 1, True)
    assert (await office.source().backlog("another")).count == 0


async def test_what_waits_while_nats_is_away_is_published_when_it_is_back(
    office: Any, running: Any, short_directory: Any
) -> None:
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    publisher = office.publisher(url=server.url)
    await add_stream(server, office)
    async with running(publisher):
        await office.emit_many(50, aggregates=5)
        await asyncio.wait_for(office.drained(), 30)
        server.stop()
        await office.emit_many(500, aggregates=5)
        assert await office.unpublished() == 500
        server.start()
        await asyncio.wait_for(office.drained(), 30)
    assert await count(server, office) == 550
    server.stop()


async def test_a_server_that_stands_still_is_reported_costs_no_event_and_repeats_none(
    office: Any, running: Any, short_directory: Any
) -> None:
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    publisher = office.publisher(
        PublisherSettings(ack_seconds=0.2, first_seconds=0.01, most_seconds=0.05), url=server.url
    )
    await add_stream(server, office)
    async with running(publisher):
        await office.emit_many(10)
        await asyncio.wait_for(office.drained(), 30)
        assert server.process is not None
        os.kill(server.process.pid, signal.SIGSTOP)
        await office.emit_many(300, aggregates=5)
        tried = "SELECT count(*) FROM postroom.outbox_events WHERE published_at IS NULL AND publish_attempts > 0"
        await until_so(lambda: office.pool.fetchval(tried))
        assert (await list_failing(office.pool, EVENTS)).failing == []  # it has refused none, and may have them
        assert (await office.source().backlog()).failing == 0
        reason = "JetStream did not acknowledge it; see the log of NATS"
        await until(lambda: publisher.counters.trouble == reason)
        os.kill(server.process.pid, signal.SIGCONT)
        await asyncio.wait_for(office.drained(), 30)
        await until(lambda: publisher.counters.trouble is None)
    assert await count(server, office) == 310
    server.stop()


async def test_what_nats_does_not_let_its_user_publish_is_said_while_other_meshes_are_published(
    office: Any, short_directory: Any, running: Any
) -> None:
    other = replace(office, context=f"{office.context}x")
    grants = [f"{other.context}.>", "$JS.API.>"], ["_INBOX.>", "$JS.EVENT.>"]
    server = NatsWithUsers(short_directory / "nats", {"worker": grants})
    server.start()
    client = await nats.connect(server.url)
    office, other = (replace(each, js=client.jetstream()) for each in (office, other))
    denied = f'publish to "{office.context}.event.order_placed.v1"): give this user that permission'
    try:
        for each in (office, other):
            await each.add_stream()
        await office.emit_many(40, aggregates=40)
        quick = PublisherSettings(ack_seconds=30, first_seconds=0.01, most_seconds=0.05, idle_seconds=0.01)
        publisher = office.publisher(quick, url=server.url_of("worker"))
        async with running(publisher):
            await until(lambda: denied in (publisher.counters.trouble or ""))
            published = await other.emit()
            await until_so(other.ids)
            assert await other.ids() == [published]
            await until(lambda: publisher.counters.published == 1)
            await until(lambda: denied in (publisher.counters.trouble or ""))
        assert await office.unpublished() == 40
        assert not await office.pool.fetchval("SELECT count(publish_error) FROM postroom.outbox_events")
    finally:
        await client.close()
        server.stop()


async def test_a_stream_that_refuses_all_that_comes_is_named_as_why_events_wait(office: Any, running: Any) -> None:
    await office.add_stream(max_msgs=1, discard="new")
    publisher = office.publisher(PublisherSettings(first_seconds=0.01, most_seconds=0.05))
    async with running(publisher):
        await office.emit_many(40, aggregates=40)
        reason = f"the stream {office.stream} refuses it (maximum messages exceeded)"
        await until(lambda: reason in (publisher.counters.trouble or ""))
        assert all(reason in each.error for each in (await list_failing(office.pool, EVENTS)).failing)
        config = (await office.js.stream_info(office.stream)).config
        config.max_msgs = -1
        await office.js.update_stream(config)
        await asyncio.wait_for(office.drained(), 30)
        await until(lambda: publisher.counters.trouble is None)
    assert len(await office.ids()) == 40


async def test_a_second_publish_of_an_event_is_the_same_message(office: Any) -> None:
    """A publisher that died after the server's ack and before its own mark: the next one publishes again."""
    await office.add_stream()
    await office.emit_many(10, aggregates=2)
    publisher = office.publisher()
    await drain(publisher)
    await office.pool.execute(UNMARK)
    await drain(publisher)
    await publisher.stop()

    assert len(await office.ids()) == 10
    assert await office.pool.fetchval("SELECT array_agg(DISTINCT stream_sequence) FROM postroom.outbox_events") == [
        *range(1, 11)
    ]


@pytest.mark.parametrize(
    ("events", "takes_batches", "batches"),
    [(31, True, 0), (32, True, 1), (1000, True, 1), (1001, True, 1), (2500, True, 3), (32, False, 0)],
)
async def test_what_is_many_goes_as_an_atomic_batch(
    office: Any,
    events: int,
    takes_batches: bool,  # noqa: FBT001 - a column of the table
    batches: int,
) -> None:
    await office.add_stream(allow_atomic=takes_batches)
    await office.emit_many(events, aggregates=7)
    publisher = office.publisher(PublisherSettings(batch=3000))
    await publisher.step()
    await publisher.stop()

    messages = await office.messages()
    headers = [message.headers for message in messages]
    assert len({found["Nats-Batch-Id"] for found in headers if "Nats-Batch-Id" in found}) == batches
    rows = await office.pool.fetch("SELECT id::text, stream_sequence FROM postroom.outbox_events ORDER BY position")
    assert len(rows) == events
    assert {row[0]: row[1] for row in rows} == {
        message.headers["Nats-Msg-Id"]: message.metadata.sequence.stream for message in messages
    }


async def test_a_batch_with_one_message_that_the_stream_has_goes_message_by_message(office: Any) -> None:
    await office.add_stream()
    first = await office.emit()
    publisher = office.publisher()
    await publisher.step()
    await office.pool.execute(UNMARK)
    await office.emit_many(40, aggregates=7)
    await publisher.step()
    await publisher.stop()

    rows = await office.pool.fetch("SELECT id::text, stream_sequence FROM postroom.outbox_events ORDER BY position")
    assert (rows[0][0], [row[1] for row in rows]) == (first, [*range(1, 42)])
    assert await office.ids() == [row[0] for row in rows]
    assert (publisher.counters.published, publisher.counters.failed) == (42, 0)


async def test_a_wait_that_a_clock_ahead_has_set_ends_with_the_longest_wait(office: Any) -> None:
    await office.emit()
    await office.bury("a")
    for ahead, due in ((timedelta(seconds=30), 0), (timedelta(days=3650), 1), (timedelta(seconds=-1), 1)):
        await office.pool.execute("UPDATE postroom.outbox_events SET next_attempt_at = now() + $1::interval", ahead)
        await office.pool.execute("UPDATE postroom.dead_letters SET next_attempt_at = now() + $1::interval", ahead)
        for table in (EVENTS, LETTERS):
            async with office.source(table).claim(PublisherSettings(most_seconds=60)) as claim:
                assert len(claim.messages) == due


async def test_an_event_that_a_clock_ahead_has_dated_is_published_once_that_is_right(office: Any) -> None:
    await office.add_stream()
    ids = [await office.emit("ahead"), await office.emit()]
    await office.pool.execute(
        "UPDATE postroom.outbox_events SET occurred_at = now() + interval '10 years' WHERE aggregate_id = 'ahead'"
    )
    publisher = office.publisher()
    await drain(publisher)
    await publisher.stop()
    assert sorted(await office.ids()) == sorted(ids)
    assert await office.unpublished() == 0


@pytest.mark.parametrize(
    ("arguments", "policy", "reason"),
    [
        ("'sea', 'order', 'o', NULL, '{}'", "POL-047-001", "INVALID_OUTBOX: the event has no type"),
        ("'sea', 'order', 'o', 'e', '{}', id => NULL", "POL-047-001", "INVALID_OUTBOX: the event has no id"),
        ("'sea', 'order', 'o', 'OrderPlaced', '{}'", "POL-047-001", "INVALID_OUTBOX: the event type 'OrderPlaced'"),
        ("'Sea', 'order', 'o', 'e', '{}'", "POL-047-001", "INVALID_OUTBOX: the context 'Sea'"),
        (f"'sea', 'order', 'o', '{'x' * 65}', '{{}}'", "POL-047-001", "INVALID_OUTBOX: the event type 'x"),
        ("'sea', 'order', 'o', 'e', '{}', 0", "POL-047-001", "INVALID_OUTBOX: the version 0"),
        ("'sea', 'order', 'o', 'e', NULL", "POL-047-001", "INVALID_OUTBOX: the event has no payload"),
        (
            "'sea', 'order', 'o', 'e', '{}', occurred_at => '0001-12-31 BC'",
            "POL-047-001",
            "INVALID_OUTBOX: the time .* BC",
        ),
        ("'sea', 'order', 'o', 'e', '{}', occurred_at => '-infinity'", "POL-047-001", "INVALID_OUTBOX: the time -inf"),
        (
            "'sea', 'order', 'o', 'e', '{}', occurred_at => now() + interval '61 seconds'",
            "POL-047-002",
            "FUTURE_EVENT",
        ),
    ],
)
async def test_emit_refuses_what_breaks_a_policy_and_names_it(
    office: Any, arguments: str, policy: str, reason: str
) -> None:
    with pytest.raises(Exception, match=reason) as refused:
        await office.pool.execute(f"SELECT postroom.emit({arguments})")
    assert (refused.value.sqlstate, refused.value.constraint_name) == ("23514", policy)
    assert await office.unpublished() == 0


async def test_the_oldest_event_that_emit_takes_is_published_with_the_others(office: Any) -> None:
    await office.add_stream()
    emit = "SELECT postroom.emit($1, 'order', 'old', 'order_placed', '{}', occurred_at => '0001-01-01 00:00Z')::text"
    ids = [await office.pool.fetchval(emit, office.context), await office.emit()]
    publisher = office.publisher()
    await drain(publisher)
    await publisher.stop()
    assert sorted(await office.ids()) == sorted(ids)


LONGEST = "x" * 64


@pytest.mark.parametrize(
    ("subject", "allowed"),
    [
        (f"{LONGEST}.event.{LONGEST}.v123456789", True),
        (f"cmd.{LONGEST}.{LONGEST}.{LONGEST}.{LONGEST}.{LONGEST}", True),
        (f"{LONGEST}x.event.e.v1", False),
        (f"sea.event.{LONGEST}x.v1", False),
        (f"cmd.sea.default.work.{LONGEST}x", False),
        ("sea.event.e.v1234567890", False),
        ("sea.event.e.v0", False),
        ("Sea.event.e.v1", False),
        ("sea.inbox.alice", False),
        ("cmd.sea.default.work", False),
    ],
)
async def test_the_outbox_itself_takes_only_subjects_of_events_and_commands(
    office: Any, subject: str, *, allowed: bool
) -> None:
    insert = (
        "INSERT INTO postroom.outbox_events (id, aggregate_type, aggregate_id, event_type, payload, subject)"
        " VALUES (gen_random_uuid(), 'order', 'o', 'e', '{}', $1)"
    )
    if allowed:
        await office.pool.execute(insert, subject)
    else:
        with pytest.raises(asyncpg.CheckViolationError, match="subject"):
            await office.pool.execute(insert, subject)


async def test_emit_allows_a_minute_of_clock_skew_and_goes_with_its_transaction(office: Any) -> None:
    emit = "SELECT postroom.emit('sea', 'order', 'o', 'e', '{}', occurred_at => now() + interval '59 seconds')"
    await office.pool.execute(emit)
    async with office.pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(emit)
        await transaction.rollback()
    assert await office.unpublished() == 1


async def failure(office: Any, identity: str) -> Any:
    return await office.pool.fetchrow(
        "SELECT publish_attempts, publish_error FROM postroom.outbox_events WHERE id = $1", identity
    )


async def add_stream(server: EmbeddedNats, office: Any) -> None:
    await with_jetstream(
        server, lambda js: js.add_stream(name=office.stream, subjects=[f"{office.context}.event.>"], allow_atomic=True)
    )


async def count(server: EmbeddedNats, office: Any) -> int:
    info = await with_jetstream(server, lambda js: js.stream_info(office.stream))
    return int(info.state.messages)
