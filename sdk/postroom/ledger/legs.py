"""The two legs of an activity, which do what is left by the ledgers (docs/contract/jobs.md).

Leg 1 counts the attempt, computes the request, and sends it out with the digit that says so. Leg 2 does what a
message's ledger says is left, in order:

    step 1      the handler's work          one commit,
    step 2      children, semaphore         and each has its digit
    step 3      the completion tasks, where this message closed the job

A worker that dies leaves the steps that it had committed, and the next delivery goes on after them. A handler runs in
the transaction of its step, under a lease that is renewed, and gets a `Context` (`Running`, `step_of`).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar
from uuid import UUID, uuid5

import msgspec
import structlog
from asyncpg import InFailedSQLTransactionError

from postroom._wire import spans
from postroom._wire.arguments import to_json
from postroom._wire.retry import error_text
from postroom._wire.sql import load_queries
from postroom._wire.words import value_fault
from postroom.chassis.handlers import contained
from postroom.chassis.postgres import POSTGRES_ERRORS, Connection, Pool
from postroom.claims import Claim, leases
from postroom.errors import PostroomError
from postroom.flow import Activity, Again, Context, Flow, InvalidFlow, Job, Spawn, Step, next_steps
from postroom.ledger.errors import Fault, LeaseLost
from postroom.ledger.primitives import (
    Answer,
    Child,
    Leg1,
    Leg2,
    Request,
    complete_leg1,
    enter_leg1,
    enter_leg2,
    finish_job,
    release,
    renew,
    spawn,
)
from postroom.retry_policy import RetryPolicy

_log = structlog.get_logger(__name__)

T = TypeVar("T")

QUERIES: Final = load_queries("postroom.ledger", "engine.sql")
_ENDED: Final = (
    "the handler ended the transaction of its step, on `ctx.connection()`: the step commits when the handler "
    "returns, and rolls back when it raises; for a part of it use a nested `transaction()`"
)
_FAILED: Final = (
    "a statement on `ctx.connection()` failed, and the handler went on, in a transaction that can only be rolled back: "
    "let the error end it, or use a nested `transaction()` for what may fail"
)
_LEFT_BEHIND: Final = (
    "`ctx.connection()` was called after its step had ended, by a task that the handler left behind: await all that it "
    "begins, in an `asyncio.TaskGroup` for example"
)
_MOST_ATTEMPTS: Final = 20  # of a handler whose policy does not say it
_MOST_GROWTH: Final = 4  # bytes for a character, also with the blank that Postgres adds after each comma and colon

decode: Final = msgspec.json.Decoder().decode


async def run_leg1(running: Running, activity: UUID, most: int | None = None) -> None:
    """Run leg 1, `most` times at most; raises the faults of `enter_leg1` and `complete_leg1`, and `HandlerFailed`.

    An activity that sends nothing completes it at once.
    """
    async with running.pool.acquire() as connection:
        entry = await enter_leg1(connection, activity, running.lease, most)
    async with step_of(running, entry) as step:
        handler, request = running.activity(entry.name), None
        if handler.leg1 is not None:
            key = id_of_request(entry.activity)
            context = running.context(entry, step, key, request_id=str(key))
            body = await under_lease(running, entry, partial(handler.leg1, context, decode(entry.request)))
            request = request_of(running, handler, key, body)
        await step.conclude(lambda connection: complete_leg1(connection, entry, request))


def request_of(running: Running, activity: Activity, key: UUID, body: Any) -> Request:
    """Return the command that asks for an answer, with its id; raises `InvalidFlow` as `encode` does."""
    assert activity.queue is not None  # noqa: S101 - only what sends has a leg 1
    timeout = None if activity.timeout is None else timedelta(seconds=activity.timeout)
    payload = encode(body, f"the request of {activity.name!r}", running.most_bytes)
    return Request(key, activity.queue, payload, timeout, activity.asks)


class Spawns(NamedTuple):
    """What leg 2 spawns for a message: children, requests of cycles that work again, and of those that ask again."""

    children: list[Child]
    again: list[str]
    requests: list[Request]


async def run_leg2(running: Running, activity: UUID, guid: str, answer: Answer, most: int | None = None) -> None:
    """Run what is left of leg 2 for a message, `most` times at most, and the completion as often as its policy allows.

    Raises the faults of its primitives, and `HandlerFailed`.
    """
    completions = most_attempts(running.flow.completion_policy)
    async with running.pool.acquire() as connection:
        entry = await enter_leg2(
            connection, activity, guid, running.lease, answer, most=most, most_completions=completions
        )
    if not entry.steps.children_spawned:
        async with step_of(running, entry) as step:
            spawns = await under_lease(running, entry, partial(_work, running, entry, step, answer))
            spawned = await step.conclude(lambda connection: spawn(connection, entry, *spawns))
        entry = entry._replace(ledger=spawned.ledger, attempt=1)  # of the step that may be left
    if not entry.steps.done:
        await _complete(running, entry)


async def _work(running: Running, entry: Leg2, step: StepTransaction, answer: Answer) -> Spawns:
    """Run the handler of an answer, and leg 1 for each cycle that asks; raises `InvalidFlow`."""
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
    body = decode(answer.body)
    if activity.leg1 is not None and answer.request is None:  # of a version of it that sends nothing: it asks now
        steps: tuple[Step, ...] = (activity.again(body),)
    else:
        steps = next_steps(running.flow, activity, await activity.leg2(context, body))
    for each in steps:
        match each:
            case Spawn(spawned, request):
                key = derived(entry.activity, entry.guid, "child", len(spawns.children))
                body = encode(request, f"what {spawned.name!r} is spawned with")
                spawns.children.append(Child(key, spawned.name, body))
            case Again(again, request) if again.leg1 is None:
                what = f"what {entry.name!r} is entered with again"
                spawns.again.append(encode(request, what, running.most_bytes))
            case Again(again, request):
                key = id_of_request(entry.activity, entry.guid, len(spawns.requests))
                asking = replace(context, message=None, request_id=str(key), idempotency_key=str(key))
                spawns.requests.append(request_of(running, activity, key, await again.leg1(asking, request)))
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
            result = await under_lease(running, entry, partial(running.flow.completion, context, job))
        said = encode(result, "what it returned", running.most_bytes)
        await step.conclude(lambda connection: finish_job(connection, entry, said))


class HandlerFailed(PostroomError):
    """A handler raised, or returned something invalid: its step wrote nothing, and may be tried again."""

    attempt: int = 1  # that failed
    completion: bool = False  # the handler is that of the flow's completion


@dataclass(kw_only=True)
class Running:
    """What the legs of a flow run with; `lease` is how long a worker that died keeps others from a step."""

    pool: Pool
    flow: Flow
    lease: timedelta
    most_bytes: int = sys.maxsize  # of a message's payload
    leases: leases.Leases = field(init=False)

    def __post_init__(self) -> None:
        self.leases = leases.Leases(self._renew, self.lease.total_seconds())

    async def _renew(self, claims: Sequence[Claim]) -> list[Claim]:
        renewed = []
        for claim in claims:
            with suppress(LeaseLost):
                async with self.pool.acquire() as connection:
                    await renew(connection, claim, self.lease)
                renewed.append(claim)
        return renewed

    def activity(self, name: str) -> Activity:
        """Return the activity that a row names; raises `InvalidFlow` where the flow has none of that name."""
        activity = self.flow.activities.get(name)
        if activity is None:
            why = "it was renamed, or this worker has an older version"
            raise InvalidFlow.of("unknown_activity", f"the flow {self.flow.name!r} has no activity {name!r}: {why}")
        return activity

    def context(self, entry: Leg1 | Leg2, step: StepTransaction, key: object, **members: Any) -> Context:
        """Return the context of a handler's call."""
        return Context(
            mesh=entry.context,
            flow=self.flow.name,
            job=entry.job,
            activity=entry.activity,
            name=entry.name,
            attempt=entry.attempt,
            last_error=entry.last_error,
            traceparent=entry.traceparent,
            idempotency_key=str(key),
            _connect=step.connection,
            **members,
        )


class StepTransaction:
    """The transaction of one step: it begins when a handler asks for its connection, or with the step's end."""

    def __init__(self, pool: Pool, stack: AsyncExitStack) -> None:
        self._pool = pool
        self._stack = stack
        self._one_at_a_time = asyncio.Lock()
        self._connection: Connection | None = None
        self._ended = False

    async def connection(self) -> Connection:
        """Return the connection, in the transaction; raises `InvalidFlow` once the step has ended.

        A transaction that begins then would never end: a handler may leave tasks behind, as a `gather` that raises.
        """
        async with self._one_at_a_time:
            if self._ended:
                raise InvalidFlow.of("step_ended", _LEFT_BEHIND)
            if self._connection is None:
                connection = await self._stack.enter_async_context(self._pool.acquire())
                self._stack.push_async_callback(_reset, connection)
                await self._stack.enter_async_context(_transaction(connection))
                self._connection = connection
        return self._connection

    async def conclude(self, primitive: Callable[[Connection], Awaitable[T]]) -> T:
        """End the step with its primitive, which is a commit of its own where there is no transaction yet.

        Raises `InvalidFlow` where the handler has ended the transaction: its work and its digit would not be one
        commit.
        """
        if self._connection is not None:
            if not self._connection.is_in_transaction():
                raise InvalidFlow.of("transaction_ended", _ENDED)
            return await primitive(self._connection)
        async with self._pool.acquire() as connection:
            return await primitive(connection)

    async def end(self) -> None:
        """Begin no transaction from here on; one that is about to begin is there then, to be ended."""
        self._ended = True
        async with self._one_at_a_time:
            pass


@asynccontextmanager
async def _transaction(connection: Connection) -> AsyncIterator[None]:
    transaction = connection.transaction()
    await transaction.start()
    try:
        yield
    except BaseException:
        with suppress(*POSTGRES_ERRORS):  # of a connection that is lost, which would hide why it is
            await transaction.rollback()
        raise
    await transaction.commit()


async def _reset(connection: Connection) -> None:
    """End what a handler has set or locked in its session, which the next step has too; a broken one ends by itself."""
    with suppress(*POSTGRES_ERRORS):
        await connection.reset()


@asynccontextmanager
async def step_of(running: Running, entry: Leg1 | Leg2, *, completion: bool = False) -> AsyncIterator[StepTransaction]:
    """Lend the transaction of a step: committed at the end of the block, rolled back where it raises.

    An error that is not a `Fault` becomes `HandlerFailed`, and the lease is given up, so that the next attempt need not
    wait.
    """
    flow = running.flow.name
    span = spans.processing(
        spans.COMPLETION if completion else spans.LEG_1 if isinstance(entry, Leg1) else spans.LEG_2,
        flow if completion else f"{entry.name} of {flow}",
        None if isinstance(entry, Leg1) else entry.guid,
        entry.traceparent,
        attributes={"postroom.job": str(entry.job), "postroom.activity": str(entry.activity)},
    )
    try:
        async with AsyncExitStack() as stack:
            stack.enter_context(span)
            step = StepTransaction(running.pool, stack)
            try:
                yield step
            finally:
                await step.end()
    except Fault:
        raise
    except Exception as error:
        went_on = isinstance(error, InFailedSQLTransactionError)
        said = error_text(InvalidFlow.of("transaction_failed", _FAILED) if went_on else error)
        whose = "the completion: " if completion else ""
        failed = HandlerFailed.of("handler_failed", whose + said, retryable=True)
        failed.attempt, failed.completion = entry.attempt, completion
        _log.warning("step_failed", activity=str(entry.activity), name=entry.name, exc_info=error)
        try:
            async with running.pool.acquire() as connection:
                await release(connection, entry, str(failed))
        except POSTGRES_ERRORS as away:
            _log.warning("lease_not_released", activity=str(entry.activity), error=str(away))  # it runs out by itself
        raise failed from error


async def under_lease(running: Running, entry: Leg1 | Leg2, work: Callable[[], Awaitable[T]]) -> T:
    """Call a handler and await it while its lease is renewed; where that is lost, cancels it and raises `LeaseLost`."""
    try:
        async with running.leases.holding(entry.claim):
            return await contained(work)
    except leases.LeaseLost as lost:
        raise LeaseLost.of_entry() from lost


def most_attempts(policy: RetryPolicy | None) -> int:
    """Return how often a handler of that policy is tried."""
    return _MOST_ATTEMPTS if policy is None or policy.max_attempts is None else policy.max_attempts


def derived(activity: UUID, *words: object) -> UUID:
    """Return the id that follows from an activity and `words`: a second run derives the same."""
    return uuid5(activity, "/".join(map(str, words)))


def id_of_request(activity: UUID, *cycle: object) -> UUID:
    """Return the id of a request, of leg 1 or of a cycle; its first half is the activity's.

    A handler knows it before its step is committed, and may give it to somebody who answers at once. That answer has to
    come again, and until the commit nothing but the id says whose it is (`find_requests`).
    """
    return UUID(bytes=activity.bytes[:8] + derived(activity, *cycle, "request").bytes[8:])


def encode(value: Any, what: str, most_bytes: int = sys.maxsize) -> str:
    """Encode JSON; raises `InvalidFlow`, which calls the value `what`, where JSON or Postgres cannot hold it.

    It also refuses a value with more bytes than a message may have: it could be stored, but never published.
    """
    try:
        text = to_json(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidFlow.of("no_json", f"{what} cannot be written as JSON: {value_fault(error)}") from error
    if len(text) > most_bytes // _MOST_GROWTH:
        size = len(msgspec.json.format(text, indent=0).encode())
        if size > most_bytes:
            advice = "keep it elsewhere and say where, or raise max_payload"
            raise InvalidFlow.of("too_large", f"{what} has {size} bytes, NATS accepts {most_bytes}: {advice}")
    if "\\u0000" in text.replace("\\\\", ""):  # an escaped backslash escapes nothing
        raise InvalidFlow.of("nul_character", f"{what} contains a NUL character, which Postgres cannot store")
    return text
