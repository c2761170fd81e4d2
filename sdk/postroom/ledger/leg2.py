"""Leg 2 of an activity: what a message's ledger says is left to do, in order (docs/contract/jobs.md#jobs-15).

    step 1      the handler's work          one commit: nothing lies between them,
    step 2      children, semaphore         and each has its digit
    step 3      the completion tasks, where this message closed the job

A worker that dies leaves the steps that it had committed, and the next delivery goes on after them.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from postroom._wire.context import Job
from postroom.chassis.sql import load_queries
from postroom.ledger.plan import Plan, carry_out, plan_of
from postroom.ledger.primitives import Answer, Leg2, Spawned, enter_leg2, finish_job
from postroom.ledger.running import Running, StepTransaction, decode, encode, most_attempts, step_of, under_lease

QUERIES: Final = load_queries("postroom.ledger", "engine.sql")


async def run_leg2(running: Running, activity: UUID, guid: str, answer: Answer, most: int | None = None) -> None:
    """Run what is left of leg 2 for a message, `most` times at most, and the completion as often as its policy says.

    Raises the faults of its primitives, and `HandlerFailed`.
    """
    completions = most_attempts(running.flow.completion_policy)
    async with running.pool.acquire() as connection:
        entry = await enter_leg2(
            connection, activity, guid, running.lease, answer, most=most, most_completions=completions
        )
    if not entry.steps.children_spawned:
        spawned = await _work_and_spawn(running, entry, answer)
        entry = entry._replace(ledger=spawned.ledger, attempt=1)  # of the step that may be left
    if not entry.steps.done:
        await _complete(running, entry)


async def _work_and_spawn(running: Running, entry: Leg2, answer: Answer) -> Spawned:
    """Do steps 1 and 2 in one commit, or step 2 alone where 1 is done."""
    async with step_of(running, entry) as step:
        if entry.steps.work_done:
            plan = msgspec.json.decode(entry.result or "{}", type=Plan)
        else:
            plan = await under_lease(running, entry, _work(running, entry, step, answer))
        return await step.conclude(lambda connection: carry_out(connection, running, entry, plan))


async def _work(running: Running, entry: Leg2, step: StepTransaction, answer: Answer) -> Plan:
    activity = running.activity(entry.name)
    assert activity.leg2 is not None  # noqa: S101 - `check_flow` has seen to it
    context = running.context(
        entry,
        step,
        f"{entry.activity}/{entry.guid}",
        message=entry.guid,
        request_id=None if answer.request is None else str(answer.request),
        dimension=entry.steps.dimension,
    )
    return await plan_of(running, entry, context, await activity.leg2(context, decode(answer.body)))


async def _complete(running: Running, entry: Leg2) -> None:
    """Do step 3: the flow's completion handler, and the digit that says so, in one commit."""
    async with step_of(running, entry, completion=True) as step:
        result = None
        if running.flow.completion is not None:
            context = running.context(entry, step, entry.job, message=entry.guid)
            job = await _job(running, entry.job)
            result = await under_lease(running, entry, running.flow.completion(context, job))
        await step.conclude(lambda connection: finish_job(connection, entry, encode(result, "what it returned")))


async def _job(running: Running, job: UUID) -> Job:
    row = await running.pool.fetchrow(QUERIES["find_completed_job"], job)
    assert row is not None  # noqa: S101 - a job stays as long as its activities
    return Job(
        id=row["id"],
        flow=row["flow"],
        mesh=row["context"],
        request=decode(row["request"]),
        started_at=row["started_at"],
    )
