"""What a job is closed at, and the trace that it is of: what its start says, and every step keeps."""

from __future__ import annotations

from uuid import UUID, uuid4

import asyncpg
import pytest
from support.ledgers import LEASE, Jobs

from postroom.ledger.errors import Inactive
from postroom.ledger.operations import retry_job, show_job
from postroom.ledger.primitives import (
    Answer,
    Child,
    Request,
    Start,
    enter_leg2,
    fail_activity,
    finish_job,
    spawn,
    start_job,
)


async def with_children(jobs: Jobs, threshold: int, count: int) -> tuple[Start, list[UUID], bool]:
    """Begin a job whose root spawns children; say whether that closed it."""
    begun = Start(uuid4(), "sea", "quorum", uuid4(), "ask", "null", threshold)
    await start_job(jobs.connection, begun)
    await jobs.ask(begun.root)
    ids = [uuid4() for _ in range(count)]
    leg2 = await jobs.enter(begun.root, "m-0")
    spawned = await spawn(jobs.connection, leg2, [Child(each, "vote") for each in ids])
    for each in ids:
        await jobs.ask(each)
    return begun, ids, spawned.threshold_hit


async def answer(jobs: Jobs, activity: UUID) -> bool:
    return (await spawn(jobs.connection, await jobs.enter(activity))).threshold_hit


@pytest.mark.parametrize(("threshold", "children"), [(0, 3), (1, 3), (2, 3), (12, 15)])
async def test_the_answer_that_leaves_as_many_open_as_may_be_closes_the_job(
    jobs: Jobs, threshold: int, children: int
) -> None:
    begun, ids, hit = await with_children(jobs, threshold, children)
    hits = [hit]
    while not hits[-1]:
        hits.append(await answer(jobs, ids[len(hits) - 1]))

    assert len(hits) - 1 == children - threshold  # answers of children that it took
    assert await jobs.job(begun.job) == ("closed", threshold)
    closing = ids[len(hits) - 2]
    assert (await jobs.guid(closing))[3] == "1"
    with pytest.raises(Inactive):
        await jobs.enter(ids[-1], "late")
    await jobs.end_leases(closing)
    leg2 = await enter_leg2(jobs.connection, closing, "m-1", LEASE)
    await finish_job(jobs.connection, leg2)
    assert await jobs.job(begun.job) == ("completed", threshold)
    assert (await jobs.events(begun.job)).count("job_completed") == 1


@pytest.mark.parametrize(("threshold", "children", "answers"), [(5, 0, 0), (5, 3, 1), (3, 3, 1), (1, 1, 1)])
async def test_a_job_that_never_has_so_many_open_is_closed_by_the_first_answer_that_spawns_nothing(
    jobs: Jobs, threshold: int, children: int, answers: int
) -> None:
    begun, ids, hit = await with_children(jobs, threshold, children)
    assert hit == (answers == 0)
    assert [await answer(jobs, each) for each in ids[:answers]] == [True] * answers
    assert (await jobs.job(begun.job))[0] == "closed"


async def test_a_job_whose_completion_failed_goes_on_with_it_though_answers_are_open(jobs: Jobs) -> None:
    begun, ids, _ = await with_children(jobs, 2, 3)
    assert await answer(jobs, ids[0])
    await fail_activity(jobs.connection, ids[0], "the completion failed")
    await retry_job(jobs.connection, begun.job, actor="alice", reason="repaired")

    assert await jobs.job(begun.job) == ("closed", 2)
    leg2 = await enter_leg2(jobs.connection, ids[0], "m-1", LEASE)
    await finish_job(jobs.connection, leg2)
    tree = await show_job(jobs.connection, begun.job)
    assert sorted(step.state for step in tree.activities) == ["done", "done", "stopped", "stopped"]


async def test_a_step_that_fails_after_enough_was_answered_fails_nothing_unlike_the_completion(jobs: Jobs) -> None:
    begun, ids, _ = await with_children(jobs, 2, 3)
    late = await jobs.enter(ids[1])
    assert await answer(jobs, ids[0])
    with pytest.raises(Inactive):
        await fail_activity(jobs.connection, late.activity, "the disk is full")
    assert await jobs.job(begun.job) == ("closed", 2)
    assert "job_failed" not in await jobs.events(begun.job)

    await fail_activity(jobs.connection, ids[0], "the completion failed")
    assert await jobs.job(begun.job) == ("failed", 2)


async def test_a_threshold_below_zero_is_refused(jobs: Jobs) -> None:
    with pytest.raises(asyncpg.CheckViolationError):
        await start_job(jobs.connection, Start(uuid4(), "sea", "quorum", uuid4(), "ask", "null", -1))


TRACE, OTHER = (f"00-{digit * 32}-{digit * 16}-01" for digit in "ab")


async def test_a_trace_goes_through_requests_answers_and_what_they_spawn(jobs: Jobs) -> None:
    begun = Start(uuid4(), "sea", "nightly-export", uuid4(), "extract", "null", 0, TRACE)
    await start_job(jobs.connection, begun)
    leg1 = await jobs.ask(begun.root)
    child, silent = uuid4(), uuid4()
    answered = Answer("null", None, None, OTHER)
    leg2 = await enter_leg2(jobs.connection, begun.root, "m-1", LEASE, answered)
    await spawn(jobs.connection, leg2, [Child(child, "load"), Child(silent, "load")], (), [Request(uuid4(), "hands")])
    child_leg1 = await jobs.ask(child)
    without = await enter_leg2(jobs.connection, child, "m-2", LEASE)
    await fail_activity(jobs.connection, silent, "no disk")

    assert (leg1.traceparent, leg2.traceparent) == (TRACE, OTHER)
    assert (child_leg1.traceparent, without.traceparent) == (OTHER, OTHER)
    rows = await jobs.connection.fetch(
        "SELECT event_type, traceparent FROM postroom.outbox_events WHERE correlation_id = $1 ORDER BY position",
        begun.job,
    )
    assert [tuple(row) for row in rows] == [
        ("job_started", TRACE),
        ("activity_spawned", TRACE),
        ("asked", TRACE),
        ("activity_spawned", OTHER),
        ("activity_spawned", OTHER),
        ("hands", OTHER),
        ("asked", OTHER),
        ("job_failed", OTHER),
    ]
    await retry_job(jobs.connection, begun.job, actor="alice", reason="repaired")
    again = await jobs.connection.fetch(
        "SELECT traceparent FROM postroom.outbox_events WHERE correlation_id = $1 AND event_type = 'activity_retried'",
        begun.job,
    )
    assert [row["traceparent"] for row in again] == [OTHER]
