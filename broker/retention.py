"""The retention sweep: deletes expired messages, leaves tombstones, and forgets ids at the end of their life.

The rule is docs/contract/accept.md#accept-37. A step deletes a bounded number of rows in one statement, a message with
all that refers to it, so a sweep that is killed leaves no orphan. After each it rests four times as long as it took.
"""

import asyncio
import time
from datetime import timedelta
from functools import partial

import structlog

from broker.config import RetentionConfig, dedupe_life
from broker.database import QUERIES, Database
from broker.metrics import Metrics
from broker.trace import sweep_ended_rows
from postroom._wire.sql import why_failed
from postroom.chassis.clock import DatabaseClock
from postroom.chassis.postgres import POSTGRES_ERRORS, Connection, count_changed, rest_since
from postroom.delivery.durables import sweep_waiting
from postroom.delivery.programs import sweep_minutes, sweep_programs

_log = structlog.get_logger(__name__)


class Sweeper:
    """Sweeps whenever this process is the leader."""

    def __init__(self, database: Database, config: RetentionConfig, metrics: Metrics) -> None:
        self._database = database
        self._config = config
        self._metrics = metrics
        self._clock = DatabaseClock()

    async def run(self) -> None:
        """Sweep for ever; a lost database ends a sweep, not the sweeper."""
        while True:
            try:
                await self.sweep()
            except POSTGRES_ERRORS as error:
                _log.warning("sweep_failed", error=why_failed(error))
            await asyncio.sleep(self._config.sweep_interval_seconds)

    async def sweep(self) -> bool:
        """Delete everything that has expired, step by step; False where another process leads."""
        async with self._database.reading.acquire() as connection:
            if not await connection.fetchval(QUERIES["lead_sweeping"]):
                return False
            try:
                swept = True
                while swept and await self._clock.is_confirmed(connection):
                    started = time.monotonic()
                    messages, ids = await step(connection, self._config.sweep_rows, dedupe_life(self._config))
                    self._metrics.swept_rows.labels("message").inc(messages)
                    self._metrics.swept_rows.labels("id").inc(ids)
                    if swept := messages + ids > 0:
                        await rest_since(started)
                ended = partial(sweep_ended_rows, kept=timedelta(days=self._config.message_days))
                for forget in (sweep_programs, sweep_minutes, sweep_waiting, ended):
                    while await self._clock.is_confirmed(connection):
                        if not await forget(connection, self._config.sweep_rows):
                            break
            finally:
                await connection.reset()  # releases the lock, which the pool itself does not
        return True


async def step(connection: Connection, rows: int, id_life: timedelta | None) -> tuple[int, int]:
    """Delete up to `rows` expired messages, and up to `rows` ids older than `id_life` (None: ids live for ever)."""
    messages: int = await connection.fetchval(QUERIES["sweep_messages"], rows)
    return messages, await count_changed(connection, QUERIES["sweep_ids"], rows, id_life)
