"""The engine of a flow, as whoever delivers messages calls it: cycles, time-outs, failures, faults."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.clocks import clock_ahead
from support.ledgers import LEASE, Jobs
from support.traces import TRACE, attributes, parent_of

from postroom.flow import Context, Flow, Job
from postroom.ledger.engine import Engine, TryLater
from postroom.ledger.operations import retry_job
from postroom.ledger.primitives import Answer, Start, complete_leg1, enter_leg1, enter_leg2, release, spawn, start_job
from postroom.retry_policy import RetryPolicy

COMMANDS = "SELECT id, payload::text FROM postroom.outbox_events WHERE event_type = 'pages' ORDER BY position"
OVERDUE = "UPDATE ledger.request SET due_at = now() - interval '1 year' WHERE id = $1"  # longer than another test's

NOTHING_FAILS = """
CREATE OR REPLACE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'the database system is starting up' USING ERRCODE = 'cannot_connect_now'; END $$;
CREATE TRIGGER nothing_fails BEFORE UPDATE ON ledger.job FOR EACH ROW WHEN (NEW.state = 'failed')
  EXECUTE FUNCTION pg_temp.refuse();
"""
OTHER = f"00-{'a' * 32}-{'b' * 16}-01"


class Author:
    """A flow, what its handlers were told, and how they behave."""

    def __init__(self) -> None:
        self.told: list[Context] = []
        self.fails = 0
        self.report_fails = 0
        self.cycles = 2
        flow = self.flow = Flow("nightly-export")

        @flow.activity(sends="queue:pages", timeout=60, asks=2, retry_policy=RetryPolicy(max_attempts=3, backoff_ms=1))
        async def extract(ctx: Context, request: Any) -> Any:
            self._tell(ctx)
            return {"page": request}

        @extract.answered
        async def _(ctx: Context, answer: Any) -> Any:
            self._tell(ctx)
            return extract.again(answer) if ctx.dimension < self.cycles else None

        @flow.activity
        async def count(ctx: Context, request: int) -> Any:
            self._tell(ctx)
            return count.again(request - 1) if request else None

        @flow.activity(retry_policy=RetryPolicy(max_attempts=1))
        async def fragile(ctx: Context, _request: Any) -> None:
            self._tell(ctx)

        @flow.completed(retry_policy=RetryPolicy(max_attempts=2, backoff_ms=7000))
        async def report(ctx: Context, _job: Job) -> None:
            if self.report_fails:
                self.report_fails -= 1
                raise OSError(f"no paper at attempt {ctx.attempt}")

    def _tell(self, ctx: Context) -> None:
        self.told.append(ctx)
        if self.fails:
            self.fails -= 1
            raise OSError("the disk is full")


class Running:
    """The engine of an author's flow, and one job of it."""

    def __init__(self, author: Author, jobs: Jobs, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self.author = author
        self.jobs = jobs
        self.engine = Engine(pool, author.flow, lease=LEASE)

    async def begin(self, name: str = "extract", request: Any = 1) -> Start:
        start = Start(uuid4(), "sea", "nightly-export", uuid4(), name, json.dumps(request))
        await start_job(self.jobs.connection, start)
        return start

    async def commands(self, start: Start) -> list[tuple[UUID, Any]]:
        rows = await self.jobs.connection.fetch(COMMANDS.replace("WHERE", f"WHERE correlation_id = '{start.job}' AND"))
        return [(row[0], json.loads(row[1])) for row in rows]

    async def answer(self, start: Start, request: UUID, body: Any, guid: str | None = None) -> None:
        answer = Answer(json.dumps(body), request)
        await self.engine.answered(start.root, "extract", guid or f"to-{request}", answer)

    async def ended(self, start: Start) -> tuple[str, str | None]:
        row = await self.jobs.connection.fetchrow("SELECT state, error FROM ledger.job WHERE id = $1", start.job)
        return row["state"], row["error"]


@pytest.fixture
async def running(jobs: Jobs, jobs_database: str) -> AsyncIterator[Running]:
    async with asyncpg.create_pool(jobs_database, min_size=1, max_size=4) as pool:
        yield Running(Author(), jobs, pool)


async def test_a_cycle_of_what_sends_asks_again_and_each_answer_has_its_dimension(running: Running) -> None:
    start = await running.begin()
    await running.engine.spawned(start.root, "extract", "spawned")
    for page in (2, 3, 4):
        *_, (request, _) = await running.commands(start)
        assert await running.engine.find_askers([request, uuid4()]) == {request: (start.root, "extract", "sea")}
        await running.answer(start, request, page)

    assert [body for _, body in await running.commands(start)] == [{"page": 1}, {"page": 2}, {"page": 3}]
    assert [ctx.dimension for ctx in running.author.told if ctx.message] == [0, 1, 2]
    assert await running.ended(start) == ("completed", None)
    asked = [ctx.request_id for ctx in running.author.told if not ctx.message]
    assert asked == [str(request) for request, _ in await running.commands(start)]


async def test_each_step_of_a_job_with_a_trace_is_a_span(running: Running, recorded: InMemorySpanExporter) -> None:
    start = Start(uuid4(), "sea", "nightly-export", uuid4(), "extract", "1", 0, TRACE)
    await start_job(running.jobs.connection, start)
    running.author.cycles, running.author.fails = 0, 1
    with pytest.raises(TryLater):
        await running.engine.spawned(start.root, "extract", "spawned")
    await running.engine.spawned(start.root, "extract", "spawned")
    ((request, _),) = await running.commands(start)
    await running.engine.answered(start.root, "extract", "m-1", Answer("2", request, None, OTHER))

    spans = recorded.get_finished_spans()
    leg = "extract of nightly-export"
    assert [(span.name, parent_of(span)) for span in spans] == [
        (f"leg 1 {leg}", TRACE),
        (f"leg 1 {leg}", TRACE),
        (f"leg 2 {leg}", OTHER),
        ("completion nightly-export", OTHER),
    ]
    assert [attributes(span).get("error.type") for span in spans] == ["OSError", None, None, None]
    assert {attributes(span)["postroom.job"] for span in spans} == {str(start.job)}
    assert await running.ended(start) == ("completed", None)


@pytest.mark.parametrize("left_at", ["work", "cycle"])
async def test_what_was_begun_as_sending_nothing_asks_where_a_new_version_sends(running: Running, left_at: str) -> None:
    older = Flow("nightly-export")

    @older.activity(name="extract")
    async def _(_ctx: Context, _request: Any) -> Any:
        if left_at == "work":
            raise OSError("the disk is full")
        return next(iter(older.activities.values())).again(1)

    running.author.cycles = 1
    start, before = await running.begin(), Engine(running.engine._running.pool, older, lease=LEASE)
    if left_at == "work":
        with pytest.raises(TryLater):
            await before.spawned(start.root, "extract", "spawned")
        await running.engine.spawned(start.root, "extract", "spawned")
    else:
        await before.spawned(start.root, "extract", "spawned")
        await running.engine.answered(start.root, "extract", "cycled", Answer("1"))
    ((request, body),) = await running.commands(start)
    assert body == {"page": 1}
    for engine in (running.engine, before):
        await engine.spawned(start.root, "extract", "spawned")
    await running.answer(start, request, 2)
    assert await running.ended(start) == ("completed", None)


async def test_a_completion_that_is_due_happens_where_a_new_version_sends(running: Running) -> None:
    older = Flow("nightly-export")

    @older.activity(name="extract")
    async def _(_ctx: Context, _request: Any) -> None: ...

    @older.completed
    async def _(_ctx: Context, _job: Job) -> None:
        raise OSError("no paper")

    start = await running.begin()
    with pytest.raises(TryLater, match="no paper"):
        await Engine(running.engine._running.pool, older, lease=LEASE).spawned(start.root, "extract", "spawned")
    await running.engine.spawned(start.root, "extract", "spawned")
    assert await running.ended(start) == ("completed", None)


async def test_only_the_first_answer_to_a_request_counts(running: Running) -> None:
    start = await running.begin()
    await running.engine.spawned(start.root, "extract", "spawned")
    ((first, _),) = await running.commands(start)
    await running.answer(start, first, 2, "m-1")
    await running.answer(start, first, 9, "m-2")  # another request is open by now, and it is not for that

    assert [body for _, body in await running.commands(start)] == [{"page": 1}, {"page": 2}]
    assert await running.jobs.job(start.job) == ("running", 1)
    assert running.engine.counters.acknowledged == 1


async def test_what_sends_nothing_answers_itself_and_works_again_by_its_own_message(running: Running) -> None:
    start = await running.begin("count", 1)
    await running.engine.spawned(start.root, "count", "spawned")
    assert (await running.jobs.events(start.job))[-1] == "activity_cycled"
    await running.engine.answered(start.root, "count", "cycled", Answer("0"))
    await running.engine.spawned(start.root, "count", "spawned")

    assert await running.ended(start) == ("completed", None)
    assert [(ctx.dimension, ctx.message) for ctx in running.author.told] == [(0, "spawned"), (1, "cycled")]


async def test_a_handler_that_raises_is_tried_by_its_policy_and_told_why(running: Running) -> None:
    start = await running.begin()
    running.author.fails = 1
    with pytest.raises(TryLater, match="the disk is full"):
        await running.engine.spawned(start.root, "extract", "spawned")
    await running.engine.spawned(start.root, "extract", "spawned")

    errors = [(ctx.attempt, ctx.last_error, ctx.idempotency_key) for ctx in running.author.told]
    ((request, _),) = await running.commands(start)
    assert errors == [(1, None, str(request)), (2, "OSError: the disk is full", str(request))]
    assert await running.jobs.activity(start.root) == "002100000000000"


async def test_an_activity_whose_attempts_are_used_up_has_failed_and_says_why(running: Running) -> None:
    start = await running.begin()
    await running.engine.spawned(start.root, "extract", "spawned")
    ((request, _),) = await running.commands(start)
    running.author.fails = 3
    for _ in range(2):
        with pytest.raises(TryLater):
            await running.answer(start, request, 2)
    await running.answer(start, request, 2)

    assert await running.ended(start) == ("failed", "OSError: the disk is full (attempt 3 of 3)")
    assert (await running.jobs.events(start.job))[-1] == "job_failed"
    assert await running.jobs.guid(start.root, f"to-{request}") == "000000000000001"


async def test_a_delivery_that_finds_another_worker_at_it_is_no_attempt(running: Running) -> None:
    start = await running.begin()
    other = await enter_leg1(running.jobs.connection, start.root, LEASE)
    for _ in range(4):
        with pytest.raises(TryLater, match="another worker has it"):
            await running.engine.spawned(start.root, "extract", "spawned")
    await release(running.jobs.connection, other)
    await running.engine.spawned(start.root, "extract", "spawned")

    ((request, _),) = await running.commands(start)
    entry = await enter_leg2(running.jobs.connection, start.root, f"to-{request}", LEASE, Answer("2", request))
    for _ in range(4):
        with pytest.raises(TryLater, match="another worker has it"):
            await running.answer(start, request, 2)
    await release(running.jobs.connection, entry)
    await running.answer(start, request, 2)
    assert [ctx.attempt for ctx in running.author.told if ctx.dimension == 0] == [2, 2, 2]
    assert await running.ended(start) == ("running", None)


async def test_a_leg_that_ends_its_worker_each_time_fails_its_activity_in_the_end(running: Running) -> None:
    asking, answered = await running.begin(), await running.begin()
    await running.engine.spawned(answered.root, "extract", "spawned")
    ((request, _),) = await running.commands(answered)
    for _ in range(3):
        await enter_leg1(running.jobs.connection, asking.root, LEASE)
        await enter_leg2(running.jobs.connection, answered.root, f"to-{request}", LEASE, Answer("2", request))
        for start in (asking, answered):
            await running.jobs.end_leases(start.root)
    await running.engine.spawned(asking.root, "extract", "spawned")
    await running.answer(answered, request, 2)

    why = "attempt 3 of 3 of {} ended without a result: its worker was killed, or lost its lease"
    assert await running.ended(asking) == ("failed", why.format("leg 1"))
    assert await running.ended(answered) == ("failed", why.format("leg 2"))
    assert await running.jobs.activity(asking.root) == "003000000000000"
    assert await running.jobs.activity(answered.root) == "001100000000003"


async def test_an_activity_whose_message_came_too_often_is_given_up_when_no_worker_is_at_it(running: Running) -> None:
    start = await running.begin()
    entry = await enter_leg1(running.jobs.connection, start.root, LEASE)
    with pytest.raises(TryLater, match="a worker runs the activity"):
        await running.engine.abandon(start.root, "in vain")
    assert await running.ended(start) == ("running", None)
    await release(running.jobs.connection, entry)
    await running.engine.abandon(start.root, "in vain")
    assert await running.ended(start) == ("failed", "in vain")


async def test_after_a_retry_of_the_job_a_handler_has_all_its_attempts_again(running: Running) -> None:
    first, second = await running.begin(), await running.begin()
    await running.engine.spawned(second.root, "extract", "spawned")
    ((request, _),) = await running.commands(second)

    async def deliver() -> None:
        await running.engine.spawned(first.root, "extract", "spawned")
        await running.answer(second, request, 2)

    async def deliver_in_vain() -> None:
        for handling in (running.engine.spawned(first.root, "extract", "spawned"), running.answer(second, request, 2)):
            with pytest.raises(TryLater):
                await handling

    running.author.fails = 12
    for _ in range(2):
        await deliver_in_vain()
        await deliver_in_vain()
        await deliver()
        for start in (first, second):
            assert await running.ended(start) == ("failed", "OSError: the disk is full (attempt 3 of 3)")
            await retry_job(running.jobs.connection, start.job, actor="olga", reason="the disk has room again")
    await deliver()
    assert [ctx.attempt for ctx in running.author.told[-2:]] == [1, 1]
    for start in (first, second):
        assert await running.ended(start) == ("running", None)


async def test_a_worker_that_dies_behind_the_closing_commit_costs_the_completion_no_attempt(running: Running) -> None:
    start = await running.begin("fragile")
    leg1 = await enter_leg1(running.jobs.connection, start.root, LEASE)
    await complete_leg1(running.jobs.connection, leg1)
    entry = await enter_leg2(running.jobs.connection, start.root, "spawned", LEASE)
    assert (await spawn(running.jobs.connection, entry)).threshold_hit
    await running.jobs.end_leases(start.root)
    await running.engine.spawned(start.root, "fragile", "spawned")

    assert await running.ended(start) == ("completed", None)
    assert await running.jobs.guid(start.root, "spawned") == "000111100000001"


async def test_a_completion_is_tried_by_its_own_policy_and_not_by_that_of_the_activity_that_closed_the_job(
    running: Running,
) -> None:
    start = await running.begin("fragile")  # whose own policy allows one attempt
    running.author.report_fails = 2
    with pytest.raises(TryLater, match="the completion: OSError: no paper at attempt 1") as later:
        await running.engine.spawned(start.root, "fragile", "spawned")
    assert 0.8 * 7 <= (later.value.seconds or 0) <= 7
    await running.engine.spawned(start.root, "fragile", "spawned")
    assert await running.ended(start) == ("failed", "the completion: OSError: no paper at attempt 2 (attempt 2 of 2)")


async def test_a_completion_whose_workers_are_killed_fails_when_its_own_attempts_are_used_up(running: Running) -> None:
    start = await running.begin("count", 0)
    running.author.report_fails = 1
    with pytest.raises(TryLater):
        await running.engine.spawned(start.root, "count", "spawned")
    for _ in range(2):
        await enter_leg2(running.jobs.connection, start.root, "spawned", LEASE)
        await running.jobs.end_leases(start.root)
    await running.engine.spawned(start.root, "count", "spawned")
    state, error = await running.ended(start)
    assert state == "failed"
    assert error is not None
    assert error.startswith("attempt 2 of 2 of the completion ended without a result")


async def test_a_request_without_an_answer_goes_out_again_and_fails_in_the_end(running: Running) -> None:
    start = await running.begin()
    await running.engine.spawned(start.root, "extract", "spawned")
    ((request, _),) = await running.commands(start)
    published = (
        "UPDATE postroom.outbox_events SET published_at = now(), stream = 's', stream_created_at = now(), "
        "stream_sequence = 1 WHERE id = $1"
    )
    await running.engine.ask_again("sea", None)  # nothing is overdue
    await running.jobs.connection.execute(published, request)
    await running.jobs.connection.execute(OVERDUE, request)
    await running.engine.ask_again("sea", None)
    query = "SELECT published_at IS NULL AND epoch = 1 FROM postroom.outbox_events WHERE id = $1"
    assert await running.jobs.connection.fetchval(query, request)
    assert await running.ended(start) == ("running", None)

    await running.jobs.connection.execute(OVERDUE, request)
    await running.engine.ask_again("sea", None)
    why = f"no answer to the request {request}, asked 2 times, each time for 60 s"
    assert await running.ended(start) == ("failed", why)


async def test_an_activity_fails_for_its_last_request_though_postgres_was_away_at_first(running: Running) -> None:
    start = await running.begin()
    await running.engine.spawned(start.root, "extract", "spawned")
    ((request, _),) = await running.commands(start)
    await running.jobs.connection.execute("UPDATE ledger.request SET asked = 2 WHERE id = $1", request)
    await running.jobs.connection.execute(OVERDUE, request)
    await running.jobs.connection.execute(NOTHING_FAILS)
    try:
        with pytest.raises(asyncpg.CannotConnectNowError):
            await running.engine.ask_again("sea", None)
    finally:
        await running.jobs.connection.execute("DROP TRIGGER nothing_fails ON ledger.job")
    assert await running.engine.find_late() == ["sea"]
    await running.engine.ask_again("sea", None)
    assert (await running.ended(start))[0] == "failed"


async def test_a_request_is_not_overdue_by_a_clock_that_is_ahead_nor_for_longer_once_that_is_set_back(
    running: Running,
) -> None:
    start = await running.begin()
    await running.engine.spawned(start.root, "extract", "spawned")
    ((request, _),) = await running.commands(start)
    asked = "SELECT asked, extract(epoch FROM due_at - now())::float8 FROM ledger.request WHERE id = $1"
    await running.jobs.connection.execute(OVERDUE, request)
    running.engine._clock = clock_ahead()
    await running.engine.ask_again("sea", None)
    assert (await running.jobs.connection.fetchrow(asked, request))[0] == 1

    await running.jobs.connection.execute(
        "UPDATE ledger.request SET due_at = now() + interval '10 years' WHERE id = $1", request
    )
    await running.engine.find_late()
    times, seconds = await running.jobs.connection.fetchrow(asked, request)
    assert times == 1
    assert 50 < seconds <= 60


async def test_a_request_is_overdue_once_every_event_from_before_its_time_was_over_is_read(running: Running) -> None:
    start = await running.begin()
    await running.engine.spawned(start.root, "extract", "spawned")
    ((request, _),) = await running.commands(start)
    query = "UPDATE ledger.request SET due_at = $2, asked = 2 WHERE id = $1"
    over = datetime.now(UTC) - timedelta(days=400)
    await running.jobs.connection.execute(query, request, over)

    assert await running.engine.find_late() == ["sea"]
    await running.engine.ask_again("sea", over - timedelta(seconds=1))
    assert await running.ended(start) == ("running", None)
    await running.engine.ask_again("other", None)
    assert await running.ended(start) == ("running", None)
    await running.engine.ask_again("sea", over + timedelta(seconds=1))
    assert (await running.ended(start))[0] == "failed"


async def test_an_answer_that_waits_for_its_turn_keeps_its_request_in_time(running: Running) -> None:
    start = await running.begin()
    await running.engine.spawned(start.root, "extract", "spawned")
    ((request, _),) = await running.commands(start)
    await running.jobs.connection.execute("UPDATE ledger.request SET asked = 2 WHERE id = $1", request)
    with running.engine.holding([request, uuid4()]):
        await running.jobs.connection.execute(OVERDUE, request)
        await running.engine.ask_again("sea", None)
        assert await running.ended(start) == ("running", None)
    await running.engine.ask_again("sea", None)  # it has all its time again
    assert await running.ended(start) == ("running", None)

    await running.jobs.connection.execute(OVERDUE, request)
    await running.engine.ask_again("sea", None)
    assert (await running.ended(start))[0] == "failed"


async def test_a_full_counter_fails_the_activity_visibly(running: Running) -> None:
    start = await running.begin()
    await running.jobs.set_ledger(start.root, 999_000_000_000_000)
    await running.engine.spawned(start.root, "extract", "spawned")
    state, error = await running.ended(start)
    assert (state, "999 times" in str(error)) == ("failed", True)
    assert await running.jobs.activity(start.root) == "999000000000000"


async def test_faults_are_acknowledged_or_come_again_as_they_say(running: Running) -> None:
    start = await running.begin()
    await running.engine.spawned(uuid4(), "extract", "spawned")
    await enter_leg1(running.jobs.connection, start.root, LEASE)
    with pytest.raises(TryLater, match="another worker has it") as held:
        await running.engine.spawned(start.root, "extract", "spawned")
    assert 0 < (held.value.seconds or 0) <= LEASE.total_seconds()
    with pytest.raises(TryLater, match="try again later"):
        await running.engine.answered(start.root, "extract", "m-1", Answer("1"))
    assert (running.engine.counters.acknowledged, running.engine.counters.retried) == (1, 2)
