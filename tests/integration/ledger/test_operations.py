"""What operators do to jobs: every state, what is allowed in it, and that no step comes between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pytest
from support.ledgers import LEASE, Jobs, asking

from postroom._wire.jobs import JobCompleted, JobFailed, JobFilter, JobOperated, JobStarted, JobState
from postroom.errors import Conflict, InvalidMessage, NotFound
from postroom.ledger.errors import Duplicate, Inactive, LeaseLost
from postroom.ledger.operations import QUERIES, cancel_job, find_jobs, retry_job, show_job, start
from postroom.ledger.primitives import (
    Answer,
    Child,
    Leg2,
    Request,
    Start,
    complete_leg1,
    enter_leg1,
    enter_leg2,
    fail_activity,
    finish_job,
    spawn,
)

MANY_COMPLETED = """
INSERT INTO ledger.job (id, context, flow, state, semaphore, ended_at)
SELECT gen_random_uuid(), 'sea', 'nightly-export', 'completed', 0, now() FROM generate_series(1, 5000)
"""
BLOCKED = "SELECT cardinality(pg_blocking_pids($1)) > 0"
AGAIN = "SELECT epoch FROM postroom.outbox_events WHERE aggregate_id = $1 AND event_type = 'activity_spawned'"
RETRIED = """
SELECT payload FROM postroom.outbox_events
WHERE correlation_id = $1 AND event_type = 'activity_retried' ORDER BY position
"""
SENT = """
SELECT event_type, payload::text FROM postroom.outbox_events WHERE correlation_id = $1 AND aggregate_type = 'job'
"""


@pytest.fixture
async def another(jobs_database: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await asyncpg.connect(jobs_database)
    yield connection
    await connection.close()


async def cancel(jobs: Jobs, job: UUID) -> None:
    await cancel_job(jobs.connection, job, actor="olga", reason="the wrong day")


async def retry(jobs: Jobs, job: UUID) -> None:
    await retry_job(jobs.connection, job, actor="olga", reason="mended")


async def come_to(jobs: Jobs, state: str) -> tuple[Start, Leg2]:
    """Begin a job and let it come to a state."""
    begun = await jobs.asked()
    entry = await jobs.enter(begun.root)
    if state in {"closed", "completed", "failed at its end"}:
        await spawn(jobs.connection, entry)
    if state == "completed":
        await finish_job(jobs.connection, entry)
    if state.startswith("failed"):
        await fail_activity(jobs.connection, begun.root, "the disk is full")
    if state == "cancelled":
        await cancel(jobs, begun.job)
    return begun, entry


async def until_it_waits(url: str, connection: asyncpg.Connection[asyncpg.Record]) -> None:
    """Wait until what `connection` does waits for a lock."""
    server = await asyncpg.connect(url)
    async with asyncio.timeout(60):
        while not await server.fetchval(BLOCKED, connection.get_server_pid()):
            pass
    await server.close()


EVENTS = {
    "job_started": JobStarted,
    "job_completed": JobCompleted,
    "job_failed": JobFailed,
    "job_retried": JobOperated,
    "job_cancelled": JobOperated,
}
STATES = ("running", "closed", "completed", "failed", "failed at its end", "cancelled")
CANCELLED = dict.fromkeys(("running", "closed", "failed", "failed at its end"), "cancelled")
RETRIED_TO = {"failed": "running", "failed at its end": "closed"}


@pytest.mark.parametrize("state", STATES)
async def test_what_runs_or_failed_is_cancelled_and_what_has_ended_permanently_is_not(jobs: Jobs, state: str) -> None:
    begun, _ = await come_to(jobs, state)
    if state not in CANCELLED:
        with pytest.raises(Conflict, match="it must be running, closed or failed to be cancelled"):
            await cancel(jobs, begun.job)
    else:
        await cancel(jobs, begun.job)
    assert (await jobs.job(begun.job))[0] == CANCELLED.get(state, state.partition(" ")[0])
    assert (await jobs.events(begun.job)).count("job_cancelled") == (state in {*CANCELLED, "cancelled"})


@pytest.mark.parametrize("state", STATES)
async def test_what_failed_goes_on_and_nothing_else_does(jobs: Jobs, state: str) -> None:
    begun, _ = await come_to(jobs, state)
    before = await jobs.activity(begun.root), await jobs.guid(begun.root)
    if state not in RETRIED_TO:
        with pytest.raises(Conflict, match="cannot be retried"):
            await retry(jobs, begun.job)
    else:
        await retry(jobs, begun.job)
    assert (await jobs.job(begun.job))[0] == RETRIED_TO.get(state, state.partition(" ")[0])
    assert (await jobs.activity(begun.root), await jobs.guid(begun.root)) == before
    assert (await jobs.events(begun.job)).count("job_retried") == (state in RETRIED_TO)


async def test_each_event_of_a_job_has_the_fields_that_its_type_says(jobs: Jobs) -> None:
    seen = set()
    for state in STATES:
        begun, _ = await come_to(jobs, state)
        if state in RETRIED_TO:
            await retry(jobs, begun.job)
        for event, payload in await jobs.connection.fetch(SENT, begun.job):
            body = msgspec.json.decode(payload, type=EVENTS[event])
            assert set(msgspec.json.decode(payload)) == set(body.__struct_fields__), event
            seen.add(event)
    assert seen == set(EVENTS)


async def test_a_job_that_there_is_not_is_not_found(jobs: Jobs) -> None:
    for what in (cancel(jobs, uuid4()), retry(jobs, uuid4()), show_job(jobs.connection, uuid4())):
        with pytest.raises(NotFound, match="postroom jobs list"):
            await what


async def test_after_a_cancel_every_message_is_inactive_and_no_step_commits(jobs: Jobs) -> None:
    begun, entry = await come_to(jobs, "cancelled")
    for step in (
        enter_leg1(jobs.connection, begun.root, LEASE),
        jobs.enter(begun.root),
        jobs.enter(begun.root, "m-2"),
        spawn(jobs.connection, entry, [Child(uuid4(), "load")]),
        finish_job(jobs.connection, entry),
        fail_activity(jobs.connection, begun.root, "late"),
    ):
        with pytest.raises(Inactive, match="cancelled"):
            await step
    assert await jobs.guid(begun.root) == "000000000000001"


async def test_the_completion_tasks_of_a_job_that_is_cancelled_do_not_run(jobs: Jobs) -> None:
    begun, entry = await come_to(jobs, "closed")
    await cancel(jobs, begun.job)
    with pytest.raises(Inactive):
        await finish_job(jobs.connection, entry)
    with pytest.raises(Inactive):
        await jobs.enter(begun.root)


async def test_a_cancel_waits_for_a_step_that_is_being_committed_and_keeps_out_the_next(
    jobs: Jobs, another: asyncpg.Connection[asyncpg.Record], jobs_database: str
) -> None:
    """The step spawns a child meanwhile, which the cancel must not overlook."""
    begun = await jobs.asked()
    entry = await jobs.enter(begun.root)
    child = Child(uuid4(), "load")
    async with jobs.connection.transaction():
        await spawn(jobs.connection, entry, [child])
        cancelling = asyncio.create_task(cancel_job(another, begun.job, actor="olga", reason="late"))
        await until_it_waits(jobs_database, another)
    await cancelling
    assert await jobs.guid(begun.root) == "000011000000001"
    assert await jobs.job(begun.job) == ("cancelled", 1)
    with pytest.raises(Inactive):
        await enter_leg1(jobs.connection, child.id, LEASE)


async def test_a_step_that_waits_for_a_cancel_is_refused(
    jobs: Jobs, another: asyncpg.Connection[asyncpg.Record], jobs_database: str
) -> None:
    begun = await jobs.asked()
    entry = await jobs.enter(begun.root)
    async with jobs.connection.transaction():
        await cancel(jobs, begun.job)
        working = asyncio.create_task(spawn(another, entry))
        await until_it_waits(jobs_database, another)
    with pytest.raises(Inactive):
        await working
    assert await jobs.guid(begun.root) == "000000000000001"


async def test_a_leg_1_that_failed_goes_out_again_and_its_next_attempt_is_counted_on(jobs: Jobs) -> None:
    begun = await jobs.begin()
    await enter_leg1(jobs.connection, begun.root, LEASE)
    await fail_activity(jobs.connection, begun.root, "no such day")
    await jobs.publish()
    await retry(jobs, begun.job)
    assert await jobs.connection.fetchval(AGAIN, str(begun.root)) == 1
    leg1 = await enter_leg1(jobs.connection, begun.root, LEASE)
    assert await jobs.activity(begun.root) == "002000000000000"
    await complete_leg1(jobs.connection, leg1, asking())


async def test_a_message_that_failed_goes_on_where_it_stopped_with_what_it_said(jobs: Jobs) -> None:
    begun = await jobs.asked()
    entry = await enter_leg2(jobs.connection, begun.root, "m-1", LEASE, Answer('{"parts": 2}'))
    await fail_activity(jobs.connection, begun.root, "the disk is full")
    await retry(jobs, begun.job)

    (sent,) = [row["payload"] for row in await jobs.connection.fetch(RETRIED, begun.job)]
    assert '"guid": "m-1"' in sent
    assert '"answer": {"parts": 2}' in sent
    with pytest.raises(LeaseLost):
        await spawn(jobs.connection, entry)
    again = await jobs.enter(begun.root)
    assert (again.attempt, again.steps.dimension) == (1, 0)
    assert (await spawn(jobs.connection, again)).threshold_hit
    assert await jobs.activity(begun.root) == "001111000000002"


async def test_completion_tasks_that_failed_run_in_the_message_that_closed_the_job(jobs: Jobs) -> None:
    begun, _ = await come_to(jobs, "failed at its end")
    await retry(jobs, begun.job)
    again = await jobs.enter(begun.root)
    assert again.steps.job_closed
    await finish_job(jobs.connection, again)
    assert (await jobs.job(begun.job))[0] == "completed"


async def test_what_came_while_the_job_was_failed_comes_again_once(jobs: Jobs) -> None:
    """An answer to a sibling was acknowledged, and would be lost: the job would never end."""
    begun = await jobs.asked()
    root = await jobs.enter(begun.root)
    failing, sibling, late = (Child(uuid4(), "load") for _ in range(3))
    await spawn(jobs.connection, root, [failing, sibling, late])
    await jobs.ask(sibling.id)
    await fail_activity(jobs.connection, failing.id, "the disk is full")
    for _ in range(2):
        with pytest.raises(Inactive):
            await enter_leg2(jobs.connection, sibling.id, "m-9", LEASE, Answer('"mine"'))
    assert await jobs.activity(sibling.id) == "001100000000000"

    await jobs.publish()
    await retry(jobs, begun.job)
    sent = [row["payload"] for row in await jobs.connection.fetch(RETRIED, begun.job)]
    assert [str(sibling.id) in each and '"answer": "mine"' in each for each in sent] == [True]
    again = [await jobs.connection.fetchval(AGAIN, str(each.id)) for each in (failing, sibling, late)]
    assert again == [1, 0, 1]
    assert not await jobs.connection.fetchval("SELECT count(*) FROM ledger.missed WHERE activity_id = $1", sibling.id)


async def test_answers_that_came_while_the_job_was_failed_come_again_in_their_order(jobs: Jobs) -> None:
    """Of several to one request the first counts."""
    begun = await jobs.asked()
    root = await jobs.enter(begun.root)
    failing, sibling = (Child(uuid4(), "load") for _ in range(2))
    await spawn(jobs.connection, root, [failing, sibling])
    await jobs.ask(sibling.id)
    await fail_activity(jobs.connection, failing.id, "the disk is full")
    for number in (5, 9, 2, 7, 1):
        with pytest.raises(Inactive):
            await enter_leg2(jobs.connection, sibling.id, f"m-{number}", LEASE, Answer(str(number)))
    avoided = ("seqscan", "bitmapscan", "hashjoin")  # as of a large table
    async with jobs.connection.transaction():
        await jobs.connection.execute(";".join(f"SET LOCAL enable_{each} = off" for each in avoided))
        await retry(jobs, begun.job)
    sent = [msgspec.json.decode(row["payload"])["answer"] for row in await jobs.connection.fetch(RETRIED, begun.job)]
    assert sent == [5, 9, 2, 7, 1]


async def test_a_request_that_nobody_answered_in_time_goes_out_again_under_its_own_id(jobs: Jobs) -> None:
    begun = await jobs.begin()
    leg1 = await enter_leg1(jobs.connection, begun.root, LEASE)
    request = Request(uuid4(), "extract", "{}", timedelta(hours=1), asks=2)
    await complete_leg1(jobs.connection, leg1, request)
    await jobs.connection.execute("UPDATE ledger.request SET asked = 2, due_at = NULL WHERE id = $1", request.id)
    await jobs.publish()
    await fail_activity(jobs.connection, begun.root, "no answer in time")

    await retry(jobs, begun.job)
    query = "SELECT asked, due_at > now() FROM ledger.request WHERE id = $1"
    assert tuple(await jobs.connection.fetchrow(query, request.id) or ()) == (1, True)
    query = "SELECT published_at, epoch FROM postroom.outbox_events WHERE id = $1"
    assert tuple(await jobs.connection.fetchrow(query, request.id) or ()) == (None, 1)


async def test_every_request_whose_answer_is_overdue_goes_out_again_and_no_other(jobs: Jobs) -> None:
    begun = await jobs.asked()
    names = ("failed", "overdue", "asked in vain", "in time", "without a time")
    children = {name: Child(uuid4(), "load", "{}") for name in names}
    await spawn(jobs.connection, await jobs.enter(begun.root), list(children.values()))
    requests = {name: Request(uuid4(), "asked", "{}", timedelta(hours=1)) for name in names}
    requests["without a time"] = requests["without a time"]._replace(timeout=None)
    for name in names:
        leg1 = await enter_leg1(jobs.connection, children[name].id, LEASE)
        await complete_leg1(jobs.connection, leg1, requests[name])
    await jobs.publish()
    query = "UPDATE ledger.request SET due_at = $2 WHERE id = $1"
    over = datetime.now(UTC) - timedelta(seconds=1)
    for name, due_at in (("failed", None), ("overdue", over), ("asked in vain", None)):
        await jobs.connection.execute(query, requests[name].id, due_at)
    await fail_activity(jobs.connection, children["failed"].id, "no answer in time")

    await retry(jobs, begun.job)
    query = "SELECT id FROM postroom.outbox_events WHERE published_at IS NULL AND event_type = 'asked'"
    again = {row["id"] for row in await jobs.connection.fetch(query)}
    assert again == {requests[name].id for name in ("failed", "overdue", "asked in vain")}


async def test_a_job_whose_request_can_not_go_out_again_is_not_let_go_on(jobs: Jobs) -> None:
    begun = await jobs.asked()
    await jobs.publish()
    await fail_activity(jobs.connection, begun.root, "no answer in time")
    pruning = "DELETE FROM postroom.outbox_events WHERE event_type = 'asked' AND correlation_id = $1"
    await jobs.connection.execute(pruning, begun.job)
    with pytest.raises(Conflict, match=r"'extract' has no answer to its request .* start a new job"):
        await retry(jobs, begun.job)
    assert (await jobs.job(begun.job))[0] == "failed"


@pytest.mark.parametrize("full", [999_000_000_000_000, 1_100_099_999_999])
async def test_an_activity_without_an_attempt_left_is_not_tried_again(jobs: Jobs, full: int) -> None:
    begun = await jobs.asked() if full % 10 else await jobs.begin()
    await jobs.set_ledger(begun.root, full)
    await fail_activity(jobs.connection, begun.root, "overflow")
    with pytest.raises(Conflict, match="start a new job"):
        await retry(jobs, begun.job)
    assert (await jobs.job(begun.job))[0] == "failed"


async def test_a_retry_and_a_cancel_at_once_leave_one_truth(
    jobs: Jobs, another: asyncpg.Connection[asyncpg.Record]
) -> None:
    for _ in range(10):
        begun, _ = await come_to(jobs, "failed")
        outcomes = await asyncio.gather(
            retry(jobs, begun.job),
            cancel_job(another, begun.job, actor="olga", reason="enough"),
            return_exceptions=True,
        )
        operated = [name for name in await jobs.events(begun.job) if name in ("job_retried", "job_cancelled")]
        assert ((await jobs.job(begun.job))[0], outcomes[1]) == ("cancelled", None)
        assert operated == (["job_retried"] if outcomes[0] is None else []) + ["job_cancelled"]


async def test_a_tree_is_shown_with_a_word_for_each_step_and_what_operators_did(jobs: Jobs) -> None:
    begun = await jobs.asked()
    root = await jobs.enter(begun.root)
    children = [Child(uuid4(), name) for name in ("load", "count", "check")]
    await spawn(jobs.connection, root, children)
    await jobs.ask(children[0].id)
    await jobs.enter(children[0].id)
    await jobs.ask(children[1].id)
    shown = await show_job(jobs.connection, begun.job)
    assert [(step.name, step.state, step.ledger) for step in shown.activities] == [
        ("extract", "done", "001111000000001"),
        ("load", "working", "001100000000001"),
        ("count", "asked", "001100000000000"),
        ("check", "waiting", "000000000000000"),
    ]
    assert (shown.job.state, shown.job.open, shown.log) == ("running", 3, [])

    await fail_activity(jobs.connection, children[0].id, "the disk is full")
    await retry(jobs, begun.job)
    await cancel(jobs, begun.job)
    shown = await show_job(jobs.connection, begun.job)
    assert [step.state for step in shown.activities] == ["done", "stopped", "stopped", "stopped"]
    assert [(act.verb, act.actor, act.reason) for act in shown.log] == [
        ("retry", "olga", "mended"),
        ("cancel", "olga", "the wrong day"),
    ]


async def test_a_list_has_the_newest_first_and_what_is_wanted_alone(jobs: Jobs) -> None:
    flow = f"f-{uuid4()}"
    begun = [Start(uuid4(), mesh, flow, uuid4(), "extract") for mesh in ("sea", "sea", "land")]
    for each in begun:
        assert await start(jobs.connection, each)
    await cancel(jobs, begun[1].job)

    async def found(limit: int = 9, *, state: JobState | None = None, **options: Any) -> list[UUID]:
        wanted = JobFilter(flow=flow, state=state)
        return [row.id for row in await find_jobs(jobs.connection, wanted, limit, **options)]

    ids = [each.job for each in begun]
    assert await found() == ids[::-1]
    assert await found(limit=1) == ids[2:]
    assert await found(mesh="sea") == [ids[1], ids[0]]
    assert await found(state="cancelled") == [ids[1]]
    assert await found(mesh="land", state="cancelled") == []
    (newest,) = await find_jobs(jobs.connection, JobFilter(ids=ids[2:]), 9)
    assert await found(after=(newest.started_at, newest.id)) == [ids[1], ids[0]]
    for age, older in (
        ({"before": newest.started_at}, [ids[1], ids[0]]),
        ({"older_than_seconds": 0.0}, ids[::-1]),
        ({"older_than_seconds": 3600.0}, []),
        ({"before": newest.started_at, "older_than_seconds": 3600.0}, []),
    ):
        listed = await find_jobs(jobs.connection, JobFilter(flow=flow, **age), 9)
        assert [row.id for row in listed] == older, age


async def test_few_jobs_of_a_state_are_found_without_a_look_at_all_others(jobs: Jobs) -> None:
    begun, _ = await come_to(jobs, "failed")
    transaction = jobs.connection.transaction()
    await transaction.start()
    await jobs.connection.execute(MANY_COMPLETED)
    await jobs.connection.execute("ANALYZE ledger.job")
    found = await find_jobs(jobs.connection, JobFilter(state="failed"), 50)
    types = "text, text, text, bigint, timestamptz, uuid, uuid[], float8, timestamptz"
    await jobs.connection.execute(f"PREPARE listing ({types}) AS {QUERIES['find_jobs']}")
    values = "NULL, NULL, 'failed', 50, NULL, NULL, NULL, NULL, NULL"
    plan = await jobs.connection.fetch(f"EXPLAIN EXECUTE listing ({values})")
    await transaction.rollback()
    assert begun.job in {job.id for job in found}
    assert "job_ended_early" in "".join(row[0] for row in plan)


async def test_a_start_is_repeated_only_as_it_was(jobs: Jobs) -> None:
    first = Start(uuid4(), "sea", "nightly-export", uuid4(), "extract", '{"day": 1}')
    assert await start(jobs.connection, first)
    assert not await start(jobs.connection, first._replace(root=uuid4(), request='{ "day" : 1.0 }'))
    for other in (
        first._replace(context="land"),
        first._replace(flow="weekly"),
        first._replace(name="load"),
        first._replace(request='{"day": 2}'),
    ):
        with pytest.raises(Conflict, match="with another flow or request"):
            await start(jobs.connection, other)
    assert (await jobs.events(first.job)).count("job_started") == 1


async def test_what_cannot_be_kept_is_refused_with_a_sentence(jobs: Jobs) -> None:
    job = Start(uuid4(), "sea", "nightly-export", uuid4(), "extract")
    with pytest.raises(InvalidMessage, match="no mesh 'No Such'"):
        await start(jobs.connection, job._replace(context="No Such"))
    with pytest.raises(InvalidMessage, match="Postgres cannot store the request"):
        await start(jobs.connection, job._replace(request='"\\u0000"'))
    with pytest.raises(InvalidMessage, match=r"cannot store the request \(stack depth limit exceeded\): pass another"):
        await start(jobs.connection, job._replace(request="[" * 50_000 + "]" * 50_000))
    with pytest.raises(NotFound):
        await show_job(jobs.connection, job.job)


async def test_a_message_that_was_answered_is_no_message_that_was_missed(jobs: Jobs) -> None:
    begun, _ = await come_to(jobs, "closed")
    with pytest.raises((Duplicate, Inactive)):
        await jobs.enter(begun.root, "m-2")
    assert not await jobs.connection.fetchval("SELECT count(*) FROM ledger.missed WHERE activity_id = $1", begun.root)
