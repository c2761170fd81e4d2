"""Leg 1 of an activity: count the attempt, then send the request with its digit (docs/contract/jobs.md#jobs-12)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from postroom.flow import Activity
from postroom.ledger.primitives import Leg1, Request, complete_leg1, enter_leg1
from postroom.ledger.running import Running, StepTransaction, decode, derived, encode, step_of, under_lease


async def run_leg1(running: Running, activity: UUID, most: int | None = None) -> None:
    """Run leg 1, `most` times at most; raises the faults of `enter_leg1` and `complete_leg1`, and `HandlerFailed`.

    An activity that sends nothing completes it at once.
    """
    async with running.pool.acquire() as connection:
        entry = await enter_leg1(connection, activity, running.lease, most)
    async with step_of(running, entry) as step:
        request = await _request(running, entry, step)
        await step.conclude(lambda connection: complete_leg1(connection, entry, request))


async def _request(running: Running, entry: Leg1, step: StepTransaction) -> Request | None:
    activity = running.activity(entry.name)
    if activity.leg1 is None:
        return None
    key = derived(entry.activity, "request")
    context = running.context(entry, step, key, request_id=str(key))
    body = await under_lease(running, entry, activity.leg1(context, decode(entry.request)))
    return request_of(activity, key, body)


def request_of(activity: Activity, key: UUID, body: Any) -> Request:
    """Return the command that asks for an answer, under its id."""
    assert activity.queue is not None  # noqa: S101 - only what sends has a leg 1
    timeout = None if activity.timeout is None else timedelta(seconds=activity.timeout)
    return Request(key, activity.queue, encode(body, f"the request of {activity.name!r}"), timeout, activity.asks)
