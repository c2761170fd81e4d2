"""The inbox of one consumer in Postgres: which message is attempted by whom (docs/contract/delivery.md#delivery-31).

What makes a second delivery harmless is its row here, under (source context, message id, consumer): skipped once
processed, the next attempt before that (docs/contract/delivery.md#delivery-32). What keeps two attempts from
being made at once is the lease on the row. Postgres' clock alone counts.

A Postgres that is away is waited for, however long: no message is blamed for it, and none is lost. Values that it will
not have are another thing: asking again changes nothing, so what it raised (`REFUSED`) goes to whoever asked for them.

What many tasks want at once is one statement (`Grouped`). The leases of this process are renewed while their attempts
go on, and an attempt whose lease runs out is ended (`Leases`): on this side's own clock, counted from before the
statement that took the lease was sent, so before Postgres lets anybody else begin, also when it can't be reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, Final, Generic, NamedTuple, TypeAlias, TypeVar
from uuid import UUID, uuid4

import asyncpg
import structlog

from postroom._wire.retry import Backoff
from postroom._wire.sql import load_queries
from postroom.chassis.postgres import REFUSED, UNREACHABLE, Connection, Pool, check_version, open_pool
from postroom.delivery import ROOM
from postroom.delivery.consumer import DONE, Dead, Done, Outcome
from postroom.delivery.http.client import NOBODY_THERE
from postroom.delivery.http.requests import Incoming

_log = structlog.get_logger(__name__)

QUERIES: Final = load_queries("postroom.delivery.http")

_GROUP: Final = 500  # messages in a statement
_PAUSES: Final = Backoff(0.1, 5.0)  # between two tries
_RENEWALS: Final = 3  # in the length of a lease, so that one may fail
_VANISHED_SECONDS: Final = 1.0  # when to look again for a row that went between two statements
# The planner cannot know how long the arrays are; by its guess it would read the whole table for a thousand messages.
_PLAN_BY_KEY: Final = {"enable_hashjoin": "off", "enable_mergejoin": "off", "enable_seqscan": "off"}

Item = TypeVar("Item")
Result = TypeVar("Result")

Run = Callable[[Sequence[Item]], Awaitable[Sequence[Result]]]


class Claim(NamedTuple):
    """The right to attempt a message, until `until` (the loop's clock) unless it is renewed."""

    source_context: str
    message_id: str
    owner: UUID
    attempt: int  # 1 for the first
    last_error: str | None
    until: float


class Held(NamedTuple):
    """Somebody attempts the message now; the lease has this many `seconds` left."""

    seconds: float


State: TypeAlias = Claim | Done | Dead | Held  # what died may have its letter, or not


class Backlog(NamedTuple):
    """How many messages are neither processed nor dead, and since when (docs/contract/delivery.md#delivery-34)."""

    messages: int
    oldest_at: datetime | None


async def open_inbox_pool(url: str, *, name: str, connections: int) -> Pool:
    """Open a pool for `InboxMessages`; the caller closes it.

    Raises `Fatal`: 69 where Postgres can't be reached, 78 where its tables are not this program's.
    """
    pool = await open_pool(url, name=name, connections=connections, settings=_PLAN_BY_KEY)
    try:
        async with pool.acquire() as connection:
            await check_version(connection, ROOM, migrate_with="postroom broker migrate")
    except BaseException:
        await pool.close()
        raise
    return pool


async def get_inbox_backlog(connection: Connection | Pool, context: str, consumer: str | None = None) -> Backlog:
    """Count what came from `context`, for one consumer or for all."""
    row = await connection.fetchrow(QUERIES["backlog"], context, consumer)
    return Backlog(*row) if row is not None else Backlog(0, None)


async def find_unreachable(connection: Connection | Pool) -> dict[str, str]:
    """Return why the handlers of consumers cannot be reached, by consumer, webhooks among them, wherever they run.

    Calls of such a handler pause (docs/contract/delivery.md#delivery-37).
    """
    rows = await connection.fetch(QUERIES["unreachable"], NOBODY_THERE)
    return {row["consumer"]: row["error"] for row in rows}


class InboxMessages:
    """The rows of one consumer; any number of processes may work on them."""

    def __init__(
        self,
        pool: Pool,
        consumer: str,
        *,
        lease_seconds: float,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.lease_seconds = lease_seconds
        self.waiting_for_postgres = False
        self._pool = pool
        self._consumer = consumer
        self._lease = timedelta(seconds=lease_seconds)
        self._sleep = sleep
        self._claims = Grouped(self._claim, most=_GROUP)
        self._settlements = Grouped(self._settle, most=_GROUP)

    async def claim(self, incoming: Incoming) -> State:
        """Record the message where it is new, and begin an attempt where none is under way; each claim counts one.

        So claim what is attempted at once: a process that is killed uses up an attempt of whatever it has claimed.
        """
        return await self._claims(incoming)

    async def settle(self, claim: Claim, outcome: Outcome, *, counts: bool = True) -> bool:
        """End an attempt, or take back what was none; False where its lease had run out: it has settled nothing."""
        return await self._settlements((claim, outcome, counts))

    async def renew(self, claims: Sequence[Claim]) -> dict[Claim, float]:
        """Prolong leases; return until when (the loop's clock) those that still held. Raises what Postgres raises."""
        started = asyncio.get_running_loop().time()
        rows = await self._pool.fetch(QUERIES["renew"], self._consumer, self._lease, *_keys(claims))
        return {claims[row[0] - 1]: started + self.lease_seconds for row in rows}

    async def _claim(self, messages: Sequence[Incoming]) -> list[State]:
        owner = uuid4()
        distinct = {message[:2]: message for message in messages}
        rows, started = await self._fetch(
            QUERIES["claim"],
            self._consumer,
            owner,
            self._lease,
            [context for context, _ in distinct],
            [message_id for _, message_id in distinct],
            [message.delivery.subject for message in distinct.values()],
        )
        until = started + self.lease_seconds
        states: dict[tuple[str, str], State] = {
            (context, message_id): Claim(context, message_id, owner, attempts, last_error, until)
            for context, message_id, attempts, last_error in rows
        }
        refused = [key for key in distinct if key not in states]
        if refused:
            states |= await self._look_up(refused)
        return [self._once(states, message[:2]) for message in messages]

    def _once(self, states: dict[tuple[str, str], State], key: tuple[str, str]) -> State:
        """Hand a claim to the first of several that are the same message; the others find it held."""
        state = states.get(key, Held(_VANISHED_SECONDS))
        if isinstance(state, Claim):
            states[key] = Held(self.lease_seconds)
        return state

    async def _look_up(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], State]:
        contexts, ids = [context for context, _ in keys], [message_id for _, message_id in keys]
        rows, _ = await self._fetch(QUERIES["look_up"], self._consumer, contexts, ids)
        return {(row[0], row[1]): _state(*row[2:]) for row in rows}

    async def _settle(self, ended: Sequence[tuple[Claim, Outcome, bool]]) -> list[bool]:
        claims, outcomes, counts = zip(*ended, strict=True)
        rows, _ = await self._fetch(
            QUERIES["settle"],
            self._consumer,
            *_keys(claims),
            [isinstance(outcome, Done) for outcome in outcomes],
            [outcome.reason if isinstance(outcome, Dead) else None for outcome in outcomes],
            [None if isinstance(outcome, Done) else outcome.error for outcome in outcomes],
            counts,
        )
        settled = {row[0] for row in rows}
        return [position in settled for position in range(1, len(ended) + 1)]

    async def _fetch(self, query: str, *values: Any) -> tuple[list[asyncpg.Record], float]:
        """Run a query until Postgres has answered; return the rows, and when the try that succeeded began.

        Raises what Postgres raises at values that it refuses.
        """
        failures = 0
        while True:
            started = asyncio.get_running_loop().time()
            try:
                rows = await self._pool.fetch(query, *values)
            except REFUSED:
                raise
            except (*UNREACHABLE, asyncpg.PostgresError) as error:
                _log.warning("postgres_waited_for", consumer=self._consumer, error=f"{type(error).__name__}: {error}")
                self.waiting_for_postgres = True
                failures += 1
                await self._sleep(_PAUSES.seconds(failures))
            else:
                self.waiting_for_postgres = False
                return rows, started


def _keys(claims: Sequence[Claim]) -> tuple[list[str], list[str], list[UUID]]:
    return (
        [claim.source_context for claim in claims],
        [claim.message_id for claim in claims],
        [claim.owner for claim in claims],
    )


def _state(
    processed: bool,  # noqa: FBT001 - a column
    dead_reason: str | None,
    last_error: str | None,
    attempts: int,
    lease: float | None,
) -> State:
    if processed:
        return DONE
    if dead_reason is not None:
        return Dead(dead_reason, last_error or "", attempts)
    return Held(max(0.0, lease or 0.0))


class Grouped(Generic[Item, Result]):
    """Calls `run` with at most `most` items at once, and never twice at the same time."""

    def __init__(self, run: Run[Item, Result], *, most: int) -> None:
        self._run = run
        self._most = most
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._runner: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Result:
        """Return what `run` made of `item`; raises what it raised."""
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._runner is None:
            self._runner = asyncio.create_task(self._drain())
        return await done

    async def _drain(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                await self._run_group(group)
        finally:
            self._runner = None

    async def _run_group(self, group: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._run([item for item, _ in group])
        except BaseException as error:
            if isinstance(error, Exception) and len(group) > 1:
                for each in group:
                    await self._run_group([each])
                return
            for _, done in group:
                _fail(done, error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, done), result in zip(group, results, strict=True):
            if not done.done():  # nobody waits any more for one that was cancelled
                done.set_result(result)


def _fail(done: asyncio.Future[Result], error: BaseException) -> None:
    if done.done():
        return
    if isinstance(error, asyncio.CancelledError):
        done.cancel()
    else:
        done.set_exception(error)


class LeaseLost(Exception):
    """The lease ran out before the attempt had ended: somebody else may make another."""


class Leases:
    """Every lease of this process; `run` it as a task."""

    def __init__(self, inbox: InboxMessages) -> None:
        self._inbox = inbox
        self._interval = inbox.lease_seconds / _RENEWALS
        self._held: dict[Claim, asyncio.Timeout] = {}

    @asynccontextmanager
    async def holding(self, claim: Claim) -> AsyncIterator[None]:
        """Hold a lease for the length of the block; raises `LeaseLost` inside it, at the latest when it runs out."""
        scope = asyncio.timeout_at(claim.until)
        try:
            async with scope:
                self._held[claim] = scope
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise LeaseLost from None
        finally:
            self._held.pop(claim, None)

    async def run(self) -> None:
        """Renew for ever; a renewal that fails is tried again before the leases have run out."""
        while True:
            await asyncio.sleep(self._interval)
            try:
                async with asyncio.timeout(self._interval):
                    await self.renew()
            except (*UNREACHABLE, asyncpg.PostgresError) as error:
                _log.warning("leases_not_renewed", leases=len(self._held), error=type(error).__name__)

    async def renew(self) -> None:
        """Renew what has been held for a while; what is lost ends at once."""
        now = asyncio.get_running_loop().time()
        soon = now + self._inbox.lease_seconds - self._interval / 2
        claims = [claim for claim, scope in self._held.items() if (scope.when() or now) < soon]
        renewed = await self._inbox.renew(claims) if claims else {}
        for claim in claims:
            scope = self._held.get(claim)
            if scope is not None and not scope.expired():
                scope.reschedule(renewed.get(claim, now))
