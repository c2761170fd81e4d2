"""The worker as a process: config → Postgres → publishers and upkeep → wait → finish the batches in hand.

Any number of workers may run: rows are claimed with locks, and a second comparison with the record finds nothing more.
NATS may be away all the while, from the start on: what cannot be published waits in Postgres.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import asyncpg
import structlog

from chassis.postgres import UNREACHABLE, Pool
from chassis.runtime import run_until_stopped, stop_on_signals
from chassis.systemd import answer_watchdog, notify, watchdog_seconds
from delivery.database import open_database
from delivery.publishing import DELIVERIES, EVENTS, Backlog, Publisher, Record, sources_of
from worker.config import WorkerConfig
from worker.metrics import expose
from worker.page import serving_page
from worker.upkeep import Upkeep

_log = structlog.get_logger(__name__)

_CONNECTIONS: Final = 6  # one for each publisher, two for the upkeep, and some for who asks
_STATUS_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Services:
    """What one worker is made of."""

    pool: Pool
    record: Record
    upkeep: Upkeep
    publishers: list[Publisher]

    def reasons(self) -> list[str]:
        """Return what keeps it from publishing now."""
        troubles = ((publisher.source.name, publisher.counters.trouble) for publisher in self.publishers)
        return [f"{source} wait: {trouble}" for source, trouble in troubles if trouble is not None]

    async def backlogs(self) -> dict[str, Backlog]:
        """Ask QRY-050 of every source; none where Postgres can't tell."""
        try:
            return {one.source.name: await one.source.backlog(self.pool) for one in self.publishers}
        except (*UNREACHABLE, asyncpg.PostgresError):
            return {}

    async def metrics(self) -> bytes:
        """Return the metrics as text."""
        return expose(self.publishers, self.record, await self.backlogs())

    async def finish(self) -> None:
        """Claim nothing more, and wait for the batches in hand."""
        notify("STOPPING=1")
        await asyncio.gather(self.upkeep.stop(), *(publisher.stop() for publisher in self.publishers))


async def run(config: WorkerConfig) -> None:
    """Publish until SIGTERM or SIGINT, then finish the batches in hand.

    Raises `Fatal`: 78 for a wrong config, schema or stream, 69 where Postgres can't be reached or the port is taken.
    """
    stop = asyncio.Event()
    stop_on_signals(stop)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(open_services(config))
        page = serving_page(config.listen_host, config.listen_port, services.reasons, services.metrics)
        url = await stack.enter_async_context(page)
        _log.info("publishing", sources=[publisher.source.name for publisher in services.publishers], page=url)
        notify("READY=1")
        await run_until_stopped(_tasks(services), stop, services.finish)


@asynccontextmanager
async def open_services(config: WorkerConfig) -> AsyncIterator[Services]:
    """Build everything, and close it; raises `Fatal`."""
    pool = await open_database(config.database_url, name="postroom-worker", connections=_CONNECTIONS)
    try:
        sources = await sources_of(pool)
        record = Record(pool, sources, config.record)
        upkeep = Upkeep(pool, record, config, has_broker=DELIVERIES in sources)
        settings = {EVENTS.name: config.events, DELIVERIES.name: config.deliveries}
        publishers = [
            Publisher(
                pool,
                source,
                settings[source.name],
                config.nats,
                horizon=record.horizon,
                opened=upkeep.look_after,
                rng=random.Random(),  # noqa: S311 - it spreads retries, it hides nothing
            )
            for source in sources
        ]
        yield Services(pool=pool, record=record, upkeep=upkeep, publishers=publishers)
    finally:
        await pool.close()


def _tasks(services: Services) -> dict[str, Coroutine[Any, Any, None]]:
    tasks = {f"publisher of {publisher.source.name}": publisher.run() for publisher in services.publishers}
    tasks["upkeep"] = services.upkeep.run()
    tasks["status"] = _tell_status(services)
    if (seconds := watchdog_seconds()) is not None:
        tasks["watchdog"] = answer_watchdog(seconds / 2)
    return tasks


async def _tell_status(services: Services) -> None:
    while True:
        waiting = [f"{backlog.count} {source} wait" for source, backlog in (await services.backlogs()).items()]
        if not notify(f"STATUS={', '.join(waiting) or 'Postgres does not answer'}"):
            await asyncio.Event().wait()  # nobody listens
        await asyncio.sleep(_STATUS_SECONDS)
