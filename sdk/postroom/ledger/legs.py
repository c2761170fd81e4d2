"""The two legs of an activity, by what the ledgers say is left to do (docs/contract/jobs.md).

Leg 1 counts the attempt, computes the request, and sends it out with the digit that says so. Leg 2 does what a
message's ledger says is left, in order:

    step 1      the handler's work          one commit: nothing lies between them,
    step 2      children, semaphore         and each has its digit
    step 3      the completion tasks, where this message closed the job

A worker that dies leaves the steps that it had committed, and the next delivery goes on after them.

What step 1 leaves for step 2 is a `Plan`, kept with the message's ledger, so that after a crash the same is done.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

import msgspec

from postroom._wire.sql import load_queries
from postroom.chassis.postgres import Connection
from postroom.flow import Activity, Again, Context, Job, Spawn, next_steps
from postroom.ledger.primitives import (
    Answer,
    Child,
    Leg2,
    Request,
    Spawned,
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


class Plan(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Children by name and request, requests of cycles that work again, and bodies of those that ask again."""

    children: list[tuple[str, Any]] = msgspec.field(default_factory=list)
    again: list[Any] = msgspec.field(default_factory=list)
    asks: list[Any] = msgspec.field(default_factory=list)


async def plan_of(running: Running, entry: Leg2, context: Context, returned: Any) -> Plan:
    """Plan what a handler returned; leg 1 runs for each cycle that asks again. Raises `InvalidFlow`."""
    activity, plan = running.activity(entry.name), Plan()
    for step in next_steps(running.flow, activity, returned):
        match step:
            case Spawn(spawned, request):
                plan.children.append((spawned.name, request))
            case Again(again, request) if again.leg1 is None:
                plan.again.append(request)
            case Again(again, request):
                key = str(_ask_id(entry, len(plan.asks)))
                asking = replace(context, message=None, request_id=key, idempotency_key=key)
                plan.asks.append(await again.leg1(asking, request))
    return plan


async def carry_out(connection: Connection, running: Running, entry: Leg2, plan: Plan) -> Spawned:
    """Do step 2 as it is planned, and with it step 1, which is the plan; raises as `spawn` does."""
    children = [
        Child(
            derived(entry.activity, entry.guid, "child", place), name, encode(request, f"what {name!r} is spawned with")
        )
        for place, (name, request) in enumerate(plan.children)
    ]
    again = [encode(request, f"what {entry.name!r} is entered with again") for request in plan.again]
    activity = running.activity(entry.name)
    requests = [request_of(activity, _ask_id(entry, place), body) for place, body in enumerate(plan.asks)]
    return await spawn(connection, entry, children, again, requests, result=encode(plan, "what it returned"))


def _ask_id(entry: Leg2, place: int) -> UUID:
    return derived(entry.activity, entry.guid, "request", place)


async def run_leg2(running: Running, activity: UUID, guid: str, answer: Answer, most: int | None = None) -> None:
    """Run what is left of leg 2 for a message, `most` times at most, and the completion as often as its policy says.

    Raises the faults of its primitives, and `HandlerFailed`.
    """
    completions = most_attempts(running.flow.completion_policy)
    async with running.pool.acquire() as connection:
        entry = await enter_leg2(
            connection, activity, guid, running.lease, answer, most=most, most_completions=completions
        )
    if not entry.steps.children_spawned:  # steps 1 and 2 in one commit, or step 2 alone where 1 is done
        async with step_of(running, entry) as step:
            if entry.steps.work_done:
                plan = msgspec.json.decode(entry.result or "{}", type=Plan)
            else:
                plan = await under_lease(running, entry, _work(running, entry, step, answer))
            spawned = await step.conclude(lambda connection: carry_out(connection, running, entry, plan))
        entry = entry._replace(ledger=spawned.ledger, attempt=1)  # of the step that may be left
    if not entry.steps.done:
        await _complete(running, entry)


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
