"""The engine of one flow: what becomes of each message that moves a job on (docs/contract/jobs.md#jobs-25).

It knows no transport: its caller passes messages to `spawned` and `answered`, acknowledges where they return, and
delivers again, later, where they raise `TryLater`. A fault's `reaction` says whether the message is acknowledged,
retried or escalated; a handler that fails is tried by its policy, and then the activity has failed, and with it the
job. Attempts are those that the ledgers have counted: one whose worker died counts, a delivery that finds another
worker at it does not.

Requests that wait for their answers are asked again in time (docs/contract/jobs.md#jobs-39), but for those whose
answers wait here for their turn (`holding`), or may be among the events that no worker has read. Messages for
activities that the worker which takes them does not have (its flow is older, or a name changed) are acknowledged and
kept, no attempt is counted, and the job waits, visibly (`ledger.operations`); a worker that has the activity brings
them back, each as the message that it was.
"""

import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple
from uuid import UUID

import structlog

from postroom.chassis.clock import DatabaseClock
from postroom.chassis.postgres import Connection, Pool
from postroom.chassis.runtime import load_named
from postroom.flow import Flow, check_flow
from postroom.ledger.errors import Duplicate, Fault, Inactive, Missing, Reaction
from postroom.ledger.legs import QUERIES, HandlerFailed, Running, most_attempts, run_leg1, run_leg2
from postroom.ledger.primitives import Answer, fail_activity
from postroom.retry_policy import RetryPolicy

_log = structlog.get_logger(__name__)

MOST_AT_ONCE: Final = 100  # requests that one look sends again
_MOST_BROUGHT_BACK: Final = 100  # messages that one look brings back
_DEFAULT_POLICY: Final = RetryPolicy()


class Asker(NamedTuple):
    """The activity that sent a request, and the mesh of its job, where alone it can be answered."""

    activity: UUID
    name: str
    mesh: str


async def set_aside(connection: Connection, activity: UUID, guid: str, answer: Answer | None, worker: str) -> bool:
    """Keep a message for a worker that has its activity, since `worker` does not; one of leg 1 has no `answer`.

    Returns False where it needs no handling any more: it is done, or its job has ended permanently, or was removed.
    """
    leg, said = (1, (None, None, None, None)) if answer is None else (2, answer)
    return await connection.fetchrow(QUERIES["set_aside"], activity, guid, leg, *said, worker) is not None


class Place(NamedTuple):
    """A mesh where jobs of a flow have not ended; the oldest was started at `since`, or None: the clock was ahead."""

    flow: str
    mesh: str
    since: datetime | None


class TryLater(Exception):
    """The message has to be delivered again, `seconds` from now; None leaves the time to the caller."""

    def __init__(self, error: str, seconds: float | None) -> None:
        super().__init__(error)
        self.seconds = seconds


@dataclass(slots=True)
class EngineCounters:
    """What an engine has done since it started, for metrics."""

    done: int = 0  # messages whose steps were run to their end
    acknowledged: int = 0  # replays, and messages for what has ended or was removed
    ignored: int = 0  # messages of the mesh that are not the flow's
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
        """`lease` is how long a worker that died keeps others from a step; `worker` names this one to operators."""
        self.counters = EngineCounters()
        self.flow = flow
        self._worker = worker or f"{socket.gethostname()[:64]}/{os.getpid()}"
        self._running = Running(pool=pool, flow=flow, lease=lease)
        self._clock = DatabaseClock()
        self._held = Counter[UUID]()  # requests whose answers are here

    def limit(self, most_bytes: int) -> None:
        """Limit the messages that go out: a step that makes a larger one fails, with that as the reason."""
        self._running.most_bytes = most_bytes

    async def spawned(self, activity: UUID, name: str, guid: str) -> None:
        """Run leg 1 of an activity, for the message `guid`; raises `TryLater`.

        An activity that sends nothing answers itself: leg 2 runs at once, for the same message. So does one that sends,
        where a worker with another version of the flow has begun it as one that sends nothing: it asks then.
        """

        async def legs(most: int) -> None:
            known = self.flow.activities.get(name)
            sends = known is not None and known.leg1 is not None
            try:
                await run_leg1(self._running, activity, most)
            except (Duplicate, Inactive):  # where this message has closed the job, the completion may be left
                if sends and not await self._running.pool.fetchval(QUERIES["has_begun_unasked"], activity):
                    raise
            else:
                if sends:
                    return
            body = await self._running.pool.fetchval(QUERIES["find_request"], activity)
            await run_leg2(self._running, activity, guid, Answer(body), most)

        if not await self._set_aside(activity, name, guid, None):
            await self._run(activity, name, legs)

    async def answered(self, activity: UUID, name: str, guid: str, answer: Answer) -> None:
        """Run leg 2 of an activity for the message `guid` that answers it; raises `TryLater`."""
        if not await self._set_aside(activity, name, guid, answer):
            await self._run(activity, name, lambda most: run_leg2(self._running, activity, guid, answer, most))

    async def find_askers(self, requests: list[UUID]) -> dict[UUID, Asker]:
        """Return the activities of the flow that sent `requests`, by request, for those that one of them sent."""
        if not requests:
            return {}
        rows = await self._running.pool.fetch(QUERIES["find_requests"], requests, self.flow.name)
        return {row["id"]: Asker(row["activity"], row["name"], row["context"]) for row in rows}

    async def fail(self, activity: UUID, error: str) -> None:
        """Fail an activity and its job, visibly; does nothing where the job has ended."""
        async with self._running.pool.acquire() as connection:
            await self._fail(connection, activity, error)

    async def abandon(self, activity: UUID, error: str) -> None:
        """Fail an activity whose message came too often; raises `TryLater` while a worker runs it."""
        if await self._running.pool.fetchval(QUERIES["is_leased"], activity):
            raise TryLater(f"a worker runs the activity {activity}", None)
        await self.fail(activity, error)

    @contextmanager
    def holding(self, requests: Sequence[UUID]) -> Iterator[None]:
        """Let no request be overdue whose answer is handled in the block, where it may wait for the steps of others."""
        held = Counter(requests)
        self._held += held
        try:
            yield
        finally:
            self._held -= held

    async def find_late(self) -> list[str]:
        """Return the meshes where answers are overdue."""
        pool = self._running.pool
        await pool.execute(QUERIES["set_back"], self.flow.name, MOST_AT_ONCE)
        return [row["context"] for row in await pool.fetch(QUERIES["find_late"], self.flow.name)]

    async def ask_again(self, mesh: str, unread: datetime | None) -> None:
        """Send some overdue requests of a mesh again; one that was sent as often as it may be fails its activity.

        None is overdue while the clock of Postgres is in doubt, nor while its answer may have come in time, and be held
        or unread. The first event that no worker has read came at `unread`; None where all are read.
        """
        pool = self._running.pool
        await pool.execute(QUERIES["prolong"], list(self._held))
        overdue = await pool.fetch(QUERIES["find_overdue"], self.flow.name, mesh, MOST_AT_ONCE)
        if not overdue or not await self._clock.is_confirmed(pool):
            return
        for request, activity, due_at in overdue:
            if unread is not None and due_at >= unread:
                return
            async with pool.acquire() as connection, connection.transaction():
                await connection.execute(QUERIES["take_turn"], activity)
                row = await connection.fetchrow(QUERIES["ask_again"], activity, request)
                if row is not None and row["verdict"] == "exhausted":  # no later look finds it: one commit with its end
                    times = "once" if row["asked"] == 1 else f"{row['asked']} times"
                    error = f"no answer to the request {request}, asked {times}, each time for {row['seconds']:g} s"
                    await self._fail(connection, activity, error)
            self.counters.asked_again += row is not None and row["verdict"] == "done"

    async def bring_back(self) -> None:
        """Have messages go out again that workers without their activity have set aside, where the flow here has it."""
        activities = list(self.flow.activities)
        rows = await self._running.pool.fetch(QUERIES["bring_back"], self.flow.name, activities, _MOST_BROUGHT_BACK)
        self.counters.brought_back += len(rows)

    async def _fail(self, connection: Connection, activity: UUID, error: str) -> None:
        try:
            await fail_activity(connection, activity, error)
        except (Inactive, Missing):
            return
        self.counters.failed += 1
        _log.error("activity_failed", activity=str(activity), error=error)

    async def _set_aside(self, activity: UUID, name: str, guid: str, answer: Answer | None) -> bool:
        """Keep a message for another worker where this one does not have its activity; False: it has to run here."""
        if name in self.flow.activities:
            return False
        async with self._running.pool.acquire() as connection:
            kept = await set_aside(connection, activity, guid, answer, self._worker)
        self.counters.set_aside += kept
        if kept:
            _log.warning("activity_unknown", activity=str(activity), name=name, flow=self.flow.name)
        return kept

    async def _run(self, activity: UUID, name: str, legs: Callable[[int], Awaitable[None]]) -> None:
        known = self.flow.activities.get(name)
        policy = None if known is None else known.retry_policy
        try:
            await legs(most_attempts(policy))
            self.counters.done += 1
        except Fault as fault:
            match fault.reaction:
                case Reaction.ACKNOWLEDGE:
                    self.counters.acknowledged += 1
                case Reaction.ESCALATE:
                    await self.fail(activity, str(fault))
                case Reaction.RETRY:
                    self.counters.retried += 1
                    raise TryLater(str(fault), fault.problem.retry_after) from fault
        except HandlerFailed as failed:
            policy = self.flow.completion_policy if failed.completion else policy
            most = most_attempts(policy)
            if failed.attempt < most:
                self.counters.retried += 1
                raise TryLater(str(failed), (policy or _DEFAULT_POLICY).backoff.seconds(failed.attempt)) from failed
            await self.fail(activity, f"{failed} (attempt {failed.attempt} of {most})")


def load_flow(name: str) -> Flow:
    """Import `module:flow`, also from the current directory; the `Fatal` that it raises says what to change."""
    example = "module:flow, as in nightly_export:flow"
    found: Flow = load_named(name, check_flow, what="a flow", example=example)
    return found
