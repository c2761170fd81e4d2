"""The leases of this process: renewed while their attempts go on; an attempt whose lease runs out is ended.

An attempt is cut off on this side's own clock, counted from before the statement that took the lease was sent: it ends
before Postgres lets anybody else begin, also when Postgres can't be reached meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import asyncpg
import structlog

from postroom.chassis.postgres import UNREACHABLE
from postroom.delivery.http.inbox_messages import Claim, InboxMessages

_log = structlog.get_logger(__name__)

_RENEWALS: Final = 3  # in the length of a lease, so that one may fail


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
