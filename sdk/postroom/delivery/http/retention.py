"""The retention sweep of `inbox_messages`: a consumer forgets what it has handled, once that cannot come again.

A message comes again for as long as its stream holds it (a consumer may be made anew, or have been killed before it
acknowledged), and for as long as a worker publishes what streams have lost (its `record.horizon_days`). So a row goes
when it is older than both, and ended for `keep_days`. Rows of messages that are waiting stay. A sweep goes in slices,
and rests after each four times as long as it took; any number of processes may sweep.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Final

import asyncpg
import structlog
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom._wire.sql import load_queries
from postroom.chassis.postgres import UNREACHABLE, Pool
from postroom.delivery.errors import NATS_ERRORS
from postroom.delivery.http.settings import InboxSettings
from postroom.delivery.nats import end_if_cancelled

_log = structlog.get_logger(__name__)

_QUERIES: Final = load_queries(__package__, "queries.sql")
_NOTHING_IS_OLDER: Final = datetime(1, 1, 1, tzinfo=UTC)
_CLOCK_SKEW: Final = timedelta(minutes=10)  # by which the clocks of Postgres and NATS may differ
_REST_PER_SLICE: Final = 4  # the rest after a slice, in durations of that slice


class InboxRetention:
    """Sweeps the rows of the consumer `durable` of `stream`: `run` it as a task."""

    def __init__(self, pool: Pool, js: JetStreamContext, *, stream: str, durable: str, settings: InboxSettings) -> None:
        self.swept = 0
        self._pool = pool
        self._js = js
        self._stream = stream
        self._durable = durable
        self._settings = settings

    async def run(self) -> None:
        """Sweep until cancelled; Postgres or NATS away ends a sweep, not the sweeper."""
        while True:
            try:
                await self.sweep()
            except (*UNREACHABLE, *NATS_ERRORS, asyncpg.PostgresError) as error:
                _log.warning("inbox_sweep_failed", consumer=self._durable, error=type(error).__name__)
            end_if_cancelled()
            await asyncio.sleep(self._settings.sweep_interval_seconds)

    async def sweep(self) -> int:
        """Delete what cannot come again, slice by slice; return how many rows that were."""
        oldest = await self._oldest()
        swept, rows = 0, self._settings.sweep_rows
        while True:
            started = asyncio.get_running_loop().time()
            keep = timedelta(days=self._settings.keep_days)
            deleted = int(await self._pool.fetchval(_QUERIES["sweep"], self._durable, keep, oldest, rows))
            swept, self.swept = swept + deleted, self.swept + deleted
            if deleted < rows:
                return swept
            await asyncio.sleep(_REST_PER_SLICE * (asyncio.get_running_loop().time() - started))

    async def _oldest(self) -> datetime | None:
        """Return when the oldest message of the stream was stored, by any clock; None where it holds none."""
        with suppress(NotFoundError):  # no such stream, or its first message went a moment ago: the next sweep is right
            info = await self._js.stream_info(self._stream)
            if not info.state.messages:
                return None
            first = await self._js.get_msg(self._stream, info.state.first_seq)
            return datetime.fromisoformat(str(first.time)) - _CLOCK_SKEW
        return _NOTHING_IS_OLDER
