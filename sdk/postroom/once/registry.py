"""The idempotency registry: an effect behind it happens once, however often its message is delivered.

What makes a second run a no-op is the key's row: `COMMITTED` returns its result, `PENDING` waits, and
only the owner of a lease that still runs can commit. The one gap that no registry can close is between the effect and
its commit: if a worker dies, or loses its lease, exactly there, the effect happened without a record, and the next
attempt repeats it. Pass the same key to the service that has the effect, if it accepts one.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from postroom._wire.once import KeysQuery, KeyState
from postroom._wire.retry import STEADY, Backoff, Patience, error_text, retrying
from postroom._wire.words import when
from postroom.chassis.config import MAX_DAYS, MAX_SECONDS
from postroom.claims import Dead, Ended, Later, leases
from postroom.errors import Conflict, InvalidMessage, PostroomError
from postroom.once.model import (
    MAX_ERROR,
    Begun,
    Done,
    Held,
    KeyHeld,
    LeaseLost,
    Result,
    Run,
    Scope,
    Store,
    state_of,
    unusable,
)

LEASE: Final = 30.0  # seconds
WAIT: Final = 10.0  # seconds
KEEP_DAYS: Final = 90
_DAY: Final = 86_400.0  # seconds
_BETWEEN_PURGES: Final = 3600.0  # seconds
_PURGED: Final = 1000  # keys of one transaction
_LOOKS: Final = Backoff(0.05, 1.0, least=STEADY)  # pauses between two looks at a key that another holds
_RACES: Final = 100  # how often a key may change between two steps before that is an error


class Registry:
    """Keys in a `store`, for the producer, or for one `group` of consumers.

    A claim's lease runs for `lease` seconds and is renewed while its block runs. For a key that another worker holds it
    waits at most `wait` seconds; then `KeyHeld` says when to try again.
    """

    def __init__(
        self,
        store: Store,
        *,
        group: str | None = None,
        lease: float = LEASE,
        wait: float = WAIT,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        if not (0 < lease <= MAX_SECONDS and wait >= 0):
            raise ValueError("a lease must last more than 0 seconds and at most 100 years, and a wait 0 or more")
        self.lease = lease
        self.clock = clock
        self.sleep = sleep
        self._store = store
        self._group = group
        self._wait = wait
        renew = partial(leases.renewed, store, seconds=lease)
        self._leases = leases.Leases(renew, lease, clock=clock, sleep=sleep)

    def once(self, tenant: str, topic: str, key: str) -> AbstractAsyncContextManager[Claim]:
        """Do something once: the block runs with a claim, whose `first` says whether to do it.

            async with registry.once(tenant, topic, key) as claim:
                if claim.first:
                    claim.result = await charge_card(order)

        At its end the block commits `claim.result`, which every later claim gets. An exception makes the key
        `FAILED`, free for the next attempt, which finds it as `claim.last_error`, and is raised on. A block whose
        lease is lost is cancelled, and `LeaseLost` is raised.

        Raises `KeyHeld` where another worker holds the key for longer than `wait`, `InvalidMessage` for a name or a
        result that can't be stored, and `Unavailable` where the store can't be reached.
        """
        return _Once(self._claimed(Scope(tenant, topic, key, self._group)))

    async def begin(self, scope: Scope) -> Begun:
        """Return whether to run, the result, or until when another holds the key; doesn't wait."""
        owner = new_owner()
        if not scope.key:
            return Run((), owner, 1, None, None, math.inf)
        for _ in range(_RACES):
            started = self.clock()
            try:
                (begun,) = await self._store.claim([(*scope.columns, "PENDING")], owner, self.lease)
            except asyncio.CancelledError as error:  # it may have the key all the same, and nobody would hold it
                with suppress(PostroomError):
                    await _whole(self.fail(scope, owner, error_text(error)))
                raise
            if isinstance(begun, Run):
                begun.until = started + self.lease
            if not isinstance(begun, Held | Dead) or (isinstance(begun, Held) and begun.seconds > 0):
                return begun
        raise RuntimeError(f"{scope} was taken and released by others {_RACES} times: try again")

    async def begin_waiting(self, scope: Scope) -> Run | Done:
        """Begin, and wait while another worker holds the key; raises `KeyHeld` after `wait` seconds."""
        deadline, looks = self.clock() + self._wait, 0
        while isinstance(begun := await self.begin(scope), Held):
            left = deadline - self.clock()
            if left <= 0:
                detail = f"{scope} is held by another worker until {when(begun.until)}: try again"
                raise KeyHeld.of("key_held", detail, retryable=True, retry_after=begun.seconds)
            looks += 1
            await self.sleep(min(_LOOKS.seconds(looks), left, max(begun.seconds, _LOOKS.first)))
        return begun

    async def renew(self, scope: Scope, owner: str) -> datetime | None:
        """Prolong the lease to `lease` seconds from now; raises `LeaseLost`."""
        if not scope.key:
            return None
        (until,) = await self._store.renew([(scope.columns, owner)], self.lease)
        if until is None:
            raise LeaseLost.of_scope(scope)
        return until

    async def commit(self, scope: Scope, owner: str, result: Result) -> None:
        """Record that it is done, with its result; raises `LeaseLost`. A second call by the same owner does nothing."""
        await self._settle(scope, owner, Done(result), "COMMITTED")

    async def fail(self, scope: Scope, owner: str, error: str) -> None:
        """Record why it failed and free the key; raises `LeaseLost`. A second call by the same owner does nothing."""
        words = error.encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
        await self._settle(scope, owner, Later(words[:MAX_ERROR]), "FAILED")

    async def purge(self, age: float, limit: int = 1000) -> int:
        """Delete up to `limit` keys that ended more than `age` seconds ago; return how many.

        A key that was deleted can run again: `age` has to be longer than the time in which a message can be delivered
        again, the stream's `max_age` and an operator's replay included. Call it again while it returns `limit`.
        """
        return await self._store.purge(age, limit)

    async def forget_old(self, keep_days: float) -> int:
        """Delete every key that ended more than `keep_days` ago, in steps; return how many."""
        forgotten = 0
        while True:
            purged = await self.purge(keep_days * _DAY, _PURGED)
            forgotten += purged
            if purged < _PURGED:
                return forgotten

    async def _settle(self, scope: Scope, owner: str, outcome: Done | Later, state: KeyState) -> None:
        """Settle a key, or find that this owner has done so before, and the answer was lost."""
        if not scope.key or (await self._store.settle([Ended(scope.columns, owner, outcome)]))[0]:
            return
        row = (await self._store.look_up([scope.columns])).get(scope.columns)
        if row is None or (row.owner, state_of(row)) != (owner, state):
            raise LeaseLost.of_scope(scope)

    @asynccontextmanager
    async def _claimed(self, scope: Scope) -> AsyncIterator[Claim]:
        begun = await self.begin_waiting(scope)
        claim = Claim(begun)
        if isinstance(begun, Done):
            yield claim
            return
        try:
            async with self._leases.holding(begun) if scope.key else nullcontext():
                yield claim
        except leases.LeaseLost as lost:
            raise LeaseLost.of_scope(scope) from lost.__cause__
        except BaseException as error:
            try:
                await _whole(self.fail(scope, begun.owner, error_text(error)))
            except PostroomError as failure:
                error.add_note(f"The key stays held until its lease runs out: {failure}")
            raise
        patience = Patience(begun.until - self.clock(), clock=self.clock, sleep=self.sleep)
        await _whole(retrying(lambda: self.commit(scope, begun.owner, claim.kept), patience))


class _Once(AbstractAsyncContextManager["Claim"]):
    def __init__(self, block: AbstractAsyncContextManager[Claim]) -> None:
        self._block = block
        self._entered = False

    async def __aenter__(self) -> Claim:
        if self._entered:
            raise RuntimeError("this claim was entered before: call `once` again for each block")
        self._entered = True
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, trace)


class Claim:
    """What a block knows about its key.

    `first`: it is not done yet, so do it. `attempt`: how many attempts there were, this one included. `last_error`: why
    the previous one failed (`lease_expired`: it ended without a result), None for the first.
    """

    def __init__(self, begun: Run | Done) -> None:
        self.first = isinstance(begun, Run)
        self.attempt = begun.attempt if isinstance(begun, Run) else 0
        self.last_error = begun.last_error if isinstance(begun, Run) else None
        self.kept = (isinstance(begun, Done) and begun.result) or Result.of(None)

    @property
    def result(self) -> Any:
        """What was committed, or will be: bytes, or anything that JSON can express."""
        return self.kept.value

    @result.setter
    def result(self, value: Any) -> None:
        if not self.first:
            raise Conflict.of("already_committed", "the key has its result already: set one only where `first`")
        self.kept = Result.of(value)


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Finish `work` even where the caller is cancelled meanwhile: what happened has to be recorded."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def new_owner() -> str:
    """Create an owner token: a readable name, and 128 random bits."""
    return f"{socket.gethostname()[:64]}/{os.getpid()}/{secrets.token_hex(16)}"


@asynccontextmanager
async def open_registry(
    url: str, *, group: str | None = None, lease: float = LEASE, wait: float = WAIT, keep_days: float | None = None
) -> AsyncIterator[Registry]:
    """Open the registry at `url`, and close it after the block.

    `postgresql://…` for any number of hosts (needs `postroom[postgres]`), `sqlite:///absolute/path` for the processes
    of one host, `memory:` for one process, without persistence. What is missing there is created. Use it in one event
    loop: another one, as that of another thread, opens its own.

    Keys of all programs that ended more than `keep_days` ago are deleted, at once and every hour. The default is
    90 days, and in Postgres never, since a worker of that database does it (its `once.keep_days`). Where all keys are
    that old none is deleted: the clock may be wrong. See `Registry.purge`.

    Raises `InvalidMessage` for another address, `Unavailable` and `PostroomError` as the stores do.
    """
    if keep_days is not None and not 0 < keep_days <= MAX_DAYS:
        raise ValueError("keep_days must be more than 0, and at most a hundred years")
    store, forgetting = await open_store(url), None
    try:
        registry = Registry(store, group=group, lease=lease, wait=wait)
        if keep_days is not None or not _is_postgres(url):
            forgetting = await _forgetting(registry, store, KEEP_DAYS if keep_days is None else keep_days)
        yield registry
    finally:
        if forgetting is not None:
            forgetting.cancel()
            await asyncio.wait([forgetting])
        await store.close()


async def _forgetting(registry: Registry, store: Store, keep_days: float) -> asyncio.Task[None]:
    """Forget old keys, and return the task that does so every hour until it is cancelled.

    A clock may be years ahead for a moment, and what was forgotten by it is done again. So no key is old unless
    another one, which was there an hour ago, is not.
    """
    kept = timedelta(days=keep_days, seconds=2 * _BETWEEN_PURGES)

    async def latest_end() -> datetime | None:
        return next((key.lease_until or key.settled_at for key in await store.find(KeysQuery(limit=1))), None)

    async def look(latest: datetime | None) -> None:
        if latest is not None and await store.now() - latest < kept:
            await registry.forget_old(keep_days)

    async def hourly(latest: datetime | None) -> None:
        going_on = asyncio.current_task()
        assert going_on is not None  # noqa: S101 - it runs in one
        while not going_on.cancelling():  # an error of a clean-up may have replaced the cancellation
            await registry.sleep(_BETWEEN_PURGES)
            with suppress(PostroomError):  # each claim reports an unreachable store; the next hour makes up for it
                await look(latest)
                latest = await latest_end()

    latest = await latest_end()
    await look(latest)
    return asyncio.create_task(hourly(latest), name="idempotency retention")


def _is_postgres(url: str) -> bool:
    return str(url).partition(":")[0] in {"postgresql", "postgres"}


async def open_store(url: str, *, create: bool = True) -> Store:
    """Open the store at `url`, as `open_registry` does; without `create`, raises `NotFound` where it is missing."""
    if _is_postgres(url):
        try:
            from postroom.once.postgres import PostgresStore  # noqa: PLC0415 - asyncpg is an extra
        except ModuleNotFoundError as error:
            raise unusable(f"{error.name} is missing: install postroom[postgres]") from error
        return await PostgresStore.open(url, create=create)
    scheme, _, rest = str(url).partition(":")
    if url != "memory:" and not (scheme == "sqlite" and rest.startswith("///")):
        sentence = "a registry must be at postgresql://…, sqlite:///absolute/path or memory:"
        raise InvalidMessage.of("invalid_registry_url", sentence)
    from postroom.once.sqlite import SqliteStore  # noqa: PLC0415 - some builds of Python have no sqlite3

    return await SqliteStore.open(Path(rest[2:]) if rest else None, create=create)
