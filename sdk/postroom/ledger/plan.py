"""What step 1 leaves for step 2: kept with the message's ledger, so that after a crash the same is done."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from uuid import UUID

import msgspec

from postroom._wire.context import Context
from postroom.chassis.postgres import Connection
from postroom.flow import Activity, Again, Spawn, Step, next_steps
from postroom.ledger.leg1 import request_of
from postroom.ledger.primitives import Child, Leg2, Request, Spawned, spawn
from postroom.ledger.running import Running, derived, encode


class Plan(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """Children by name and request, requests of cycles that work again, and bodies of those that ask again."""

    children: list[tuple[str, Any]] = msgspec.field(default_factory=list)
    again: list[Any] = msgspec.field(default_factory=list)
    asks: list[Any] = msgspec.field(default_factory=list)


async def plan_of(running: Running, entry: Leg2, context: Context, returned: Any) -> Plan:
    """Plan what a handler returned; leg 1 runs for each cycle that asks again. Raises `InvalidFlow`."""
    activity, plan = running.activity(entry.name), Plan()
    for step in next_steps(running.flow, activity, returned):
        await _add(plan, entry, context, step)
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
    requests = _requests(running.activity(entry.name), entry, plan)
    return await spawn(connection, entry, children, again, requests, result=encode(plan, "what it returned"))


async def _add(plan: Plan, entry: Leg2, context: Context, step: Step) -> None:
    match step:
        case Spawn(activity, request):
            plan.children.append((activity.name, request))
        case Again(activity, request) if activity.leg1 is None:
            plan.again.append(request)
        case Again(activity, request):
            key = str(_ask_id(entry, len(plan.asks)))
            asking = replace(context, message=None, request_id=key, idempotency_key=key)
            plan.asks.append(await activity.leg1(asking, request))


def _requests(activity: Activity, entry: Leg2, plan: Plan) -> list[Request]:
    return [request_of(activity, _ask_id(entry, place), body) for place, body in enumerate(plan.asks)]


def _ask_id(entry: Leg2, place: int) -> UUID:
    return derived(entry.activity, entry.guid, "request", place)
