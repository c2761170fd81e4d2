"""The leases that a process holds: renewed three times in their length, and ended in time.

The holder of a claim must not go on once another owner may have it. So a block ends at the end of its lease by the
holder's own clock, also when the store can't be reached, and at once when the store reports that the lease is lost.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Final

from postroom._wire.retry import Backoff
from postroom.claims import Claim, Claims

_RENEWALS: Final = 3  # in the length of a lease, so that one may fail


async def renewed(table: Claims, held: Sequence[Claim], seconds: float) -> list[Claim]:
    """Prolong leases of a table; return those that still held."""
    ends = await table.renew([(claim.key, claim.owner) for claim in held], seconds)
    return [claim for claim, end in zip(held, ends, strict=True) if end is not None]


class LeaseLost(Exception):
    """The lease ran out before the attempt had ended: another owner may begin the next."""


class Leases:
    """The leases of one process; a task renews them while there are any."""

    def __init__(
        self,
        renew: Callable[[Sequence[Claim]], Awaitable[Collection[Claim]]],
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`renew` prolongs leases by `seconds` and returns those that still held; where it raises, it is called again.

        `clock` is that of `Claim.until`.
        """
        self._renew = renew
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._interval = seconds / _RENEWALS
        self._pauses = Backoff(self._interval / 8, self._interval)  # after renewals that failed
        self._held: dict[Claim, asyncio.Timeout] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._error: Exception | None = None  # of the last renewal, where that failed

    @asynccontextmanager
    async def holding(self, claim: Claim) -> AsyncIterator[None]:
        """Hold a lease for the length of the block; where it is lost, the block is cancelled: raises `LeaseLost`."""
        scope = asyncio.timeout(claim.until - self._clock())
        try:
            async with scope:
                self._held[claim] = scope
                if self._keeper is None:
                    self._keeper = asyncio.create_task(self._keep(), name="leases")
                try:
                    yield
                finally:
                    del self._held[claim]
                    if not self._held and self._keeper is not None:
                        self._keeper.cancel()
                        self._keeper = None
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if not scope.expired():
                raise
            raise LeaseLost from (self._error or error)
        if scope.expired():
            raise LeaseLost from self._error

    async def _keep(self) -> None:
        failures = 0
        while True:
            await self._sleep(self._pauses.seconds(failures) if failures else self._interval)
            try:
                async with asyncio.timeout(self._interval):
                    await self._renew_due()
            except Exception as error:  # noqa: BLE001 - after any error, the leases have not been renewed
                self._error = error
                failures += 1
            else:
                self._error, failures = None, 0
            for claim in [claim for claim in self._held if claim.until <= self._clock()]:
                self._end(claim)

    async def _renew_due(self) -> None:
        """Renew what has been held for a while; what is lost ends at once."""
        now = self._clock()
        due = [claim for claim in self._held if claim.until < now + self._seconds - self._interval / 2]
        renewed = await self._renew(due) if due else ()
        for claim in due:
            if claim not in renewed:
                self._end(claim)
            elif (scope := self._held.get(claim)) is not None and not scope.expired():
                claim.until = now + self._seconds
                scope.reschedule(asyncio.get_running_loop().time() + claim.until - self._clock())

    def _end(self, claim: Claim) -> None:
        scope = self._held.get(claim)
        if scope is not None and not scope.expired():
            scope.reschedule(asyncio.get_running_loop().time())
