"""The retention of jobs: those that ended permanently go after a time, with activities, ledgers and operators' log.

Their ids stay: a scheduler that starts an old job again is told that it was started before. A message for an activity
that is gone is acknowledged, as for any that there is not. A sweep goes in slices, and rests after each four times as
long as it took; any number of processes may sweep.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Final

import asyncpg
import structlog

from postroom._wire.sql import load_queries
from postroom.chassis.postgres import UNREACHABLE, Pool, rest_since

_log = structlog.get_logger(__name__)

_QUERIES: Final = load_queries("postroom.ledger", "retention.sql")
_SLICES: Final = ("remove_messages", "remove_requests", "remove_activities", "remove_jobs")
_JOBS: Final = 100  # that one slice looks at
_ROWS: Final = 1000  # that one slice removes
_SWEEP_SECONDS: Final = 3600.0  # between two sweeps


class JobRetention:
    """Removes jobs that ended more than `keep_days` ago: `run` it as a task."""

    def __init__(self, pool: Pool, keep_days: float) -> None:
        self.removed = 0
        self._pool = pool
        self._keep = timedelta(days=keep_days)

    async def run(self) -> None:
        """Sweep until cancelled; Postgres away ends a sweep, not the sweeper."""
        while True:
            try:
                await self.sweep()
            except (*UNREACHABLE, asyncpg.PostgresError) as error:
                _log.warning("job_sweep_failed", error=type(error).__name__)
            await asyncio.sleep(_SWEEP_SECONDS)

    async def sweep(self, rows: int = _ROWS) -> int:
        """Remove what is old enough, `rows` at a time; return how many jobs that were."""
        if not await self._pool.fetchval(_QUERIES["has_jobs"]):
            return 0
        before = self.removed
        found = True
        while found:
            found = False
            for name in _SLICES:
                started = time.monotonic()
                done = await self._pool.execute(_QUERIES[name], self._keep, _JOBS, rows)
                if count := int(done.rpartition(" ")[2]):
                    found = True
                    self.removed += count if name == "remove_jobs" else 0
                    await rest_since(started)
        if self.removed > before:
            _log.info("jobs_removed", jobs=self.removed - before)
        return self.removed - before
