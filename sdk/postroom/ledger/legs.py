"""The two legs of an activity, by what the ledgers say is left to do (docs/contract/jobs.md).

Leg 1 counts the attempt, computes the request, and sends it out with the digit that says so. Leg 2 does what a
message's ledger says is left, in order:

    step 1      the handler's work          one commit,
    step 2      children, semaphore         and each has its digit
    step 3      the completion tasks, where this message closed the job

A worker that dies leaves the steps that it had committed, and the next delivery goes on after them.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

from postroom._wire.sql import load_queries
from postroom.flow import Activity, Again, Job, Spawn, next_steps
from postroom.ledger.primitives import (
    Answer,
    Child,
    Leg2,
    Request,
    complete_leg1,
    enter_leg1,
    enter_leg2,
    finish_job,
    spawn,
)
from postroom.ledger.step import Running, StepTransaction, decode, derived, encode, most_attempts, step_of, under_lease

QUERIES: Final = load_queries("postroom.ledger", "engine.sql")


async def run_leg1(running: Running, activity: UUID, most: int | None = None) -> None:
    """Run leg 1, `most` times at most; raises the faults of `enter_leg1` and `complete_leg1`, and `HandlerFailed`.

    An activity that sends nothing completes it at once.
    """
    async with running.pool.acquire() as connection:
        entry = await enter_leg1(connection, activity, running.lease, most)
    async with step_of(running, entry) as step:
        handler, request = running.activity(entry.name), None
        if handler.leg1 is not None:
            key = derived(entry.activity, "request")
            context = running.context(entry, step, key, request_id=str(key))
            body = await under_lease(running, entry, handler.leg1(context, decode(entry.request)))
            request = request_of(handler, key, body)
        await step.conclude(lambda connection: complete_leg1(connection, entry, request))


def request_of(activity: Activity, key: UUID, body: Any) -> Request:
    """Return the command that asks for an answer, under its id."""
    assert activity.queue is not None  # noqa: S101 - only what sends has a leg 1
    timeout = None if activity.timeout is None else timedelta(seconds=activity.timeout)
    return Request(key, activity.queue, encode(body, f"the request of {activity.name!r}"), timeout, activity.asks)


class Spawns(NamedTuple):
    """What the work of a message spawns: children, requests of cycles that work again, and those that ask again."""

    children: list[Child]
    again: list[str]
    requests: list[Request]


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
        async with step_of(running, entry) as step:
            spawns = await under_lease(running, entry, _work(running, entry, step, answer))
            spawned = await step.conclude(lambda connection: spawn(connection, entry, *spawns))
        entry = entry._replace(ledger=spawned.ledger, attempt=1)  # of the step that may be left
    if not entry.steps.done:
        await _complete(running, entry)


async def _work(running: Running, entry: Leg2, step: StepTransaction, answer: Answer) -> Spawns:
    """Run the handler of an answer, and leg 1 for each cycle that asks again; raises `InvalidFlow`."""
    activity, spawns = running.activity(entry.name), Spawns([], [], [])
    assert activity.leg2 is not None  # noqa: S101 - `check_flow` has seen to it
    context = running.context(
        entry,
        step,
        f"{entry.activity}/{entry.guid}",
        message=entry.guid,
        request_id=None if answer.request is None else str(answer.request),
        dimension=entry.steps.dimension,
    )
    for each in next_steps(running.flow, activity, await activity.leg2(context, decode(answer.body))):
        match each:
            case Spawn(spawned, request):
                key = derived(entry.activity, entry.guid, "child", len(spawns.children))
                body = encode(request, f"what {spawned.name!r} is spawned with")
                spawns.children.append(Child(key, spawned.name, body))
            case Again(again, request) if again.leg1 is None:
                spawns.again.append(encode(request, f"what {entry.name!r} is entered with again"))
            case Again(again, request):
                key = derived(entry.activity, entry.guid, "request", len(spawns.requests))
                asking = replace(context, message=None, request_id=str(key), idempotency_key=str(key))
                spawns.requests.append(request_of(activity, key, await again.leg1(asking, request)))
    return spawns


async def _complete(running: Running, entry: Leg2) -> None:
    """Do step 3: the flow's completion handler, and the digit that says so, in one commit."""
    async with step_of(running, entry, completion=True) as step:
        result = None
        if running.flow.completion is not None:
            context = running.context(entry, step, entry.job, message=entry.guid)
            row = await running.pool.fetchrow(QUERIES["find_completed_job"], entry.job)
            assert row is not None  # noqa: S101 - a job stays as long as its activities
            job = Job(
                id=row["id"],
                flow=row["flow"],
                mesh=row["context"],
                request=decode(row["request"]),
                started_at=row["started_at"],
            )
            result = await under_lease(running, entry, running.flow.completion(context, job))
        await step.conclude(lambda connection: finish_job(connection, entry, encode(result, "what it returned")))
