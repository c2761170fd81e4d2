"""Running a user's handler: in the transaction of its step, under a lease that is renewed, and told where it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeVar
from uuid import UUID, uuid5

import asyncpg
import msgspec
import structlog

from postroom._wire.retry import tell
from postroom.chassis.postgres import UNREACHABLE, Connection, Pool
from postroom.claims import Claim, leases
from postroom.errors import PostroomError
from postroom.flow import Activity, Context, Flow, InvalidFlow
from postroom.ledger.errors import Fault, LeaseLost
from postroom.ledger.primitives import Leg1, Leg2, release, renew
from postroom.retry_policy import RetryPolicy

_log = structlog.get_logger(__name__)

T = TypeVar("T")

_ENDED: Final = (
    "the handler ended the transaction of its step, on `ctx.connection()`: the step commits when the handler "
    "returns, and rolls back when it raises; for a part of it use a nested `transaction()`"
)
_MOST_ATTEMPTS: Final = 20  # of a handler whose policy does not say it

decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder().encode


class HandlerFailed(PostroomError):
    """A handler raised, or returned what it may not: its step wrote nothing, and may be tried again."""

    attempt: int = 1  # that failed
    completion: bool = False  # the handler is that of the flow's completion

    @classmethod
    def of_error(cls, error: Exception, attempt: int, *, completion: bool = False) -> HandlerFailed:
        """Say what it raised, at which attempt."""
        whose = "the completion: " if completion else ""
        failed = cls.of("handler_failed", whose + tell(error), retryable=True)
        failed.attempt, failed.completion = attempt, completion
        return failed


class HandlerEnded(Exception):
    """A handler raised what would have ended its worker, or cancelled itself."""


@dataclass(frozen=True, kw_only=True)
class Running:
    """What the legs of a flow run with; `lease` is how long a worker that died holds others off."""

    pool: Pool
    flow: Flow
    lease: timedelta
    leases: leases.Leases = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "leases", leases.Leases(self._renew, self.lease.total_seconds()))

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
            detail = (
                f"the flow {self.flow.name!r} has no activity {name!r}: it was renamed, "
                "or this worker has an older version"
            )
            raise InvalidFlow.of("unknown_activity", detail)
        return activity

    def context(self, entry: Leg1 | Leg2, step: StepTransaction, key: object, **members: Any) -> Context:
        """Tell a handler where it is."""
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
    """The transaction of one step: it begins where a handler asks for its connection; else the end is all of it."""

    def __init__(self, pool: Pool, stack: AsyncExitStack) -> None:
        self._pool = pool
        self._stack = stack
        self._one_at_a_time = asyncio.Lock()
        self._connection: Connection | None = None

    async def connection(self) -> Connection:
        """Return the connection, in the transaction."""
        async with self._one_at_a_time:
            if self._connection is None:
                connection = await self._stack.enter_async_context(self._pool.acquire())
                await self._stack.enter_async_context(connection.transaction())
                self._connection = connection
        return self._connection

    async def conclude(self, primitive: Callable[[Connection], Awaitable[T]]) -> T:
        """End the step with its primitive, which is one commit by itself where there is no transaction yet.

        Raises `InvalidFlow` where the handler has ended the transaction, with which its work and its digit part.
        """
        if self._connection is not None:
            if not self._connection.is_in_transaction():
                raise InvalidFlow.of("transaction_ended", _ENDED)
            return await primitive(self._connection)
        async with self._pool.acquire() as connection:
            return await primitive(connection)


@asynccontextmanager
async def step_of(running: Running, entry: Leg1 | Leg2, *, completion: bool = False) -> AsyncIterator[StepTransaction]:
    """Lend the transaction of a step: committed at the end of the block, rolled back where it raises.

    What is no `Fault` becomes `HandlerFailed`, and the lease is given up, so that the next attempt need not wait.
    """
    try:
        async with AsyncExitStack() as stack:
            yield StepTransaction(running.pool, stack)
    except Fault:
        raise
    except Exception as error:
        failed = HandlerFailed.of_error(error, entry.attempt, completion=completion)
        _log.warning("step_failed", activity=str(entry.activity), name=entry.name, exc_info=error)
        try:
            async with running.pool.acquire() as connection:
                await release(connection, entry, str(failed))
        except (asyncpg.PostgresError, *UNREACHABLE) as away:
            _log.warning("lease_not_released", activity=str(entry.activity), error=str(away))  # it runs out by itself
        raise failed from error


async def under_lease(running: Running, entry: Leg1 | Leg2, work: Awaitable[T]) -> T:
    """Await a handler while its lease is renewed; where it is lost, the handler is cancelled: raises `LeaseLost`."""
    try:
        async with running.leases.holding(entry.claim):
            return await asyncio.create_task(_contained(work))  # a handler may cancel its own task
    except leases.LeaseLost as lost:
        raise LeaseLost.of_entry() from lost


def most_attempts(policy: RetryPolicy | None) -> int:
    """Return how often a handler of that policy is tried."""
    return _MOST_ATTEMPTS if policy is None or policy.max_attempts is None else policy.max_attempts


def derived(activity: UUID, *words: object) -> UUID:
    """Return the id that follows from an activity and `words`: a second run makes the same."""
    return uuid5(activity, "/".join(map(str, words)))


def encode(value: Any, what: str) -> str:
    """Write JSON; raises `InvalidFlow`, which names it as `what`, for what JSON has no words for."""
    try:
        return _encode(value).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidFlow.of("no_json", f"{what} cannot be written as JSON: {error}") from error


async def _contained(work: Awaitable[T]) -> T:
    """Await a handler; whatever would end its worker is an error like any other: raises `HandlerEnded`."""
    try:
        return await work
    except Exception:
        raise
    except BaseException as error:
        current = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling():
            raise
        raise HandlerEnded(f"the handler ended with {tell(error)}") from error
