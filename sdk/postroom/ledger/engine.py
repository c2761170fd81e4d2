"""The engine of one flow: what becomes of each message that moves a job on (docs/contract/jobs.md#jobs-25).

It knows no transport: whoever delivers messages calls `spawned` and `answered`, acknowledges where they return, and
delivers again, later, where they raise `TryLater`. Faults are acknowledged, retried or escalated as they say; a handler
that fails is tried by its policy, and then the activity has failed, and with it the job. Attempts are those
that the ledgers have counted: one whose worker died is one, a delivery that finds another worker at it is none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

import structlog

from postroom.chassis.postgres import Pool
from postroom.errors import PostroomError
from postroom.flow import Flow
from postroom.ledger.errors import Duplicate, Fault, Inactive, Missing, Reaction
from postroom.ledger.leg1 import run_leg1
from postroom.ledger.leg2 import QUERIES, run_leg2
from postroom.ledger.primitives import Answer, fail_activity
from postroom.ledger.requests import Asker, ask_again, find_askers, find_overdue
from postroom.ledger.running import HandlerFailed, Running, most_attempts
from postroom.ledger.setting_aside import bring_back, set_aside, this_worker
from postroom.retry_policy import RetryPolicy

_log = structlog.get_logger(__name__)

_DEFAULT_POLICY: Final = RetryPolicy()


class Place(NamedTuple):
    """A mesh where jobs of a flow have not ended; the oldest was started at `since`."""

    flow: str
    mesh: str
    since: datetime


class TryLater(Exception):
    """The message is to be delivered again, `seconds` from now; None leaves that to whoever delivers it."""

    def __init__(self, error: str, seconds: float | None) -> None:
        super().__init__(error)
        self.seconds = seconds


@dataclass(slots=True)
class EngineCounters:
    """What an engine has done since it started, for metrics."""

    done: int = 0  # messages whose steps were run to their end
    acknowledged: int = 0  # replays, and messages for what has ended or is gone
    ignored: int = 0  # messages of the mesh that are none of the flow's
    retried: int = 0
    failed: int = 0  # activities
    asked_again: int = 0
    set_aside: int = 0  # messages for activities that the flow here does not have
    brought_back: int = 0  # of those that another worker had set aside


async def find_places(pool: Pool, flows: Sequence[str]) -> list[Place]:
    """Return where jobs of `flows` have not ended."""
    return [Place(*row) for row in await pool.fetch(QUERIES["find_contexts"], flows)]


class Engine:
    """Runs the steps of one flow's jobs; any number of workers may run the same."""

    def __init__(self, pool: Pool, flow: Flow, *, lease: timedelta, worker: str | None = None) -> None:
        """`lease` is how long a worker that died holds others off a step; `worker` names this one to operators."""
        self.counters = EngineCounters()
        self.flow = flow
        self._worker = this_worker() if worker is None else worker
        self._running = Running(pool=pool, flow=flow, lease=lease)

    async def spawned(self, activity: UUID, name: str, guid: str) -> None:
        """Run leg 1 of an activity, for the message `guid`; raises `TryLater`.

        One that sends nothing answers itself: leg 2 runs at once, for the same message.
        """

        async def legs(most: int) -> None:
            known = self.flow.activities.get(name)
            answers_itself = known is not None and known.leg1 is None
            try:
                await run_leg1(self._running, activity, most)
            except (Duplicate, Inactive):  # of a job that this very message has closed, the completion may be left
                if not answers_itself:
                    raise
            if answers_itself:
                body = await self._running.pool.fetchval(QUERIES["find_request"], activity)
                await run_leg2(self._running, activity, guid, Answer(body), most)

        if not await self._set_aside(activity, name, guid, None):
            await self._run(activity, name, legs)

    async def answered(self, activity: UUID, name: str, guid: str, answer: Answer) -> None:
        """Run leg 2 of an activity for the message `guid` that answers it; raises `TryLater`."""
        if not await self._set_aside(activity, name, guid, answer):
            await self._run(activity, name, lambda most: run_leg2(self._running, activity, guid, answer, most))

    async def find_askers(self, requests: list[UUID]) -> dict[UUID, Asker]:
        """Return which activities of the flow sent those of `requests` that any of them sent."""
        return await find_askers(self._running.pool, self.flow.name, requests)

    async def fail(self, activity: UUID, error: str) -> None:
        """Fail an activity and its job, visibly; where the job has ended, nothing happens."""
        try:
            async with self._running.pool.acquire() as connection:
                await fail_activity(connection, activity, error)
        except (Inactive, Missing):
            return
        self.counters.failed += 1
        _log.error("activity_failed", activity=str(activity), error=error)

    async def abandon(self, activity: UUID, error: str) -> None:
        """Fail an activity whose message came too often; raises `TryLater` while a worker is at it."""
        if await self._running.pool.fetchval(QUERIES["is_leased"], activity):
            raise TryLater(f"a worker runs the activity {activity}", None)
        await self.fail(activity, error)

    async def look_after_requests(self) -> None:
        """Ask again for some of what is overdue; what was asked as often as it may be fails its activity."""
        for overdue in await find_overdue(self._running.pool, self.flow.name):
            async with self._running.pool.acquire() as connection:
                exhausted = await ask_again(connection, overdue)
            self.counters.asked_again += exhausted is None
            if exhausted is not None:
                await self.fail(overdue.activity, exhausted)

    async def bring_back(self) -> None:
        """Have go out again what workers without its activity have set aside, where the flow here has it."""
        async with self._running.pool.acquire() as connection:
            self.counters.brought_back += await bring_back(connection, self.flow.name, self.flow.activities)

    async def _set_aside(self, activity: UUID, name: str, guid: str, answer: Answer | None) -> bool:
        """Keep a message for a worker that has its activity, where this one has not; False: it is to be run here."""
        if name in self.flow.activities:
            return False
        async with self._running.pool.acquire() as connection:
            kept = await set_aside(connection, activity, guid, answer, self._worker)
        self.counters.set_aside += kept
        if kept:
            _log.warning("activity_unknown", activity=str(activity), name=name, flow=self.flow.name)
        return kept

    async def _run(self, activity: UUID, name: str, legs: Callable[[int], Awaitable[None]]) -> None:
        policy = self._policy(name)
        try:
            await legs(most_attempts(policy))
            self.counters.done += 1
        except Fault as fault:
            await self._settle(activity, fault)
        except HandlerFailed as failed:
            await self._fail_or_try_later(
                activity, failed, self.flow.completion_policy if failed.completion else policy
            )

    async def _fail_or_try_later(self, activity: UUID, failed: HandlerFailed, policy: RetryPolicy | None) -> None:
        most = most_attempts(policy)
        if failed.attempt < most:
            raise self._later(failed, (policy or _DEFAULT_POLICY).backoff.seconds(failed.attempt)) from failed
        await self.fail(activity, f"{failed} (attempt {failed.attempt} of {most})")

    async def _settle(self, activity: UUID, fault: Fault) -> None:
        match fault.reaction:
            case Reaction.ACKNOWLEDGE:
                self.counters.acknowledged += 1
            case Reaction.ESCALATE:
                await self.fail(activity, str(fault))
            case Reaction.RETRY:
                raise self._later(fault, fault.problem.retry_after)

    def _later(self, error: PostroomError, seconds: float | None) -> TryLater:
        self.counters.retried += 1
        return TryLater(str(error), seconds)

    def _policy(self, name: str) -> RetryPolicy | None:
        known = self.flow.activities.get(name)
        return None if known is None else known.retry_policy
