"""A claim on a key, and the block that runs with it: renewed while it runs, settled when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Protocol

from postroom._wire.failures import tell
from postroom._wire.retry import Patience, retrying
from postroom.errors import Conflict, PostroomError
from postroom.once.errors import LeaseLost
from postroom.once.model import Done, Result, Run, Scope

_RENEWALS: Final = 3  # of each lease, so that two may fail


class Keys(Protocol):
    """What a claim needs of its registry: see `Registry`."""

    lease: float
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]

    async def begin_waiting(self, scope: Scope) -> Run | Done:
        """Begin, and wait while another worker holds the key."""

    async def renew(self, scope: Scope, owner: str) -> datetime | None:
        """Let the lease run on."""

    async def commit(self, scope: Scope, owner: str, result: Result) -> None:
        """Record that it is done."""

    async def fail(self, scope: Scope, owner: str, error: str) -> None:
        """Record why it failed."""


class Claim:
    """What a block knows about its key.

    `first`: it is not done yet, so do it. `attempt`: how many attempts there were, this one included. `last_error`: why
    the previous one failed (`lease_expired`: it ended without a result), None for the first.
    """

    def __init__(self, begun: Run | Done) -> None:
        self.first = isinstance(begun, Run)
        self.attempt = begun.attempt if isinstance(begun, Run) else 0
        self.last_error = begun.last_error if isinstance(begun, Run) else None
        self.kept = begun.result if isinstance(begun, Done) else Result.of(None)

    @property
    def result(self) -> Any:
        """What was committed, or will be: bytes, or anything that JSON can express."""
        return self.kept.value

    @result.setter
    def result(self, value: Any) -> None:
        if not self.first:
            raise Conflict.of("already_committed", "the key has its result already: set one only where `first`")
        self.kept = Result.of(value)


@asynccontextmanager
async def claimed(registry: Keys, scope: Scope) -> AsyncIterator[Claim]:
    """Run a block with a claim on `scope`; see `Registry.once`."""
    begun = await registry.begin_waiting(scope)
    claim = Claim(begun)
    if isinstance(begun, Done):
        yield claim
        return
    lease = _Lease(registry, scope, begun)
    try:
        async with lease:
            yield claim
    except BaseException as error:
        await _whole(lease.give_up(error))
        raise
    await _whole(lease.insist(lambda: registry.commit(scope, begun.owner, claim.kept)))


class _Lease:
    """Renews a lease while the block runs. Once it is lost, the block is cancelled, and ends with `LeaseLost`."""

    def __init__(self, registry: Keys, scope: Scope, run: Run) -> None:
        self._registry = registry
        self._scope = scope
        self._run = run
        self._extend(registry.clock())
        self._lost = False

    async def __aenter__(self) -> None:
        self._block = asyncio.current_task()
        self._cancelled_before = self._block.cancelling() if self._block else 0
        self._renewing = asyncio.create_task(self._renew_for_ever(), name="idempotency lease")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._renewing.cancel()
        await asyncio.wait([self._renewing])
        if not self._lost or self._block is None:
            return
        ours = self._block.uncancel() <= self._cancelled_before
        if ours or not isinstance(error, asyncio.CancelledError):
            raise LeaseLost.of_scope(self._scope) from self._renewing.exception()

    async def insist(self, step: Callable[[], Awaitable[object]]) -> None:
        """Take a step of the owner's, again and again while the store can't be reached and the lease may still run."""
        left = self._until - self._registry.clock()
        await retrying(step, Patience(left, clock=self._registry.clock, sleep=self._registry.sleep))

    async def give_up(self, error: BaseException) -> None:
        """Record why the block failed, where that can be done; the error itself is more important."""
        if self._lost:
            return
        try:
            await self._registry.fail(self._scope, self._run.owner, tell(error))
        except PostroomError as failure:
            error.add_note(f"The key stays held until its lease runs out: {failure}")

    async def _renew_for_ever(self) -> None:
        if self._run.lease_until is None:
            return
        try:
            while True:
                await self._registry.sleep(self._registry.lease / _RENEWALS)
                since = self._registry.clock()
                await self.insist(lambda: self._registry.renew(self._scope, self._run.owner))
                self._extend(since)
        except Exception:
            self._lost = True
            if self._block is not None:
                self._block.cancel()
            raise

    def _extend(self, since: float) -> None:
        self._until = since + self._registry.lease


async def _whole(work: Coroutine[Any, Any, None]) -> None:
    """Let `work` end even where the caller is cancelled meanwhile: what happened has to be recorded."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
