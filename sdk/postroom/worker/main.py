"""The worker as a process: config → Postgres → publishers, upkeep, webhooks, jobs → wait → finish what is in hand.

Any number of workers may run: rows are claimed with locks, and a second comparison with the record finds nothing more.
NATS may be away all the while, from the start on: what cannot be published waits in Postgres.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, Final

import structlog

from postroom.chassis.runtime import (
    answer_watchdog,
    managed,
    notify,
    run_until_stopped,
    stop_on_signals,
    watchdog_seconds,
)
from postroom.worker.config import WorkerConfig
from postroom.worker.page import serving_page
from postroom.worker.services import Services, open_services

_log = structlog.get_logger(__name__)

_STATUS_SECONDS: Final = 5.0


async def run(config: WorkerConfig) -> None:
    """Publish until SIGTERM or SIGINT, then finish what is in hand.

    Raises `Fatal`: 78 for a wrong config, schema or stream, 69 where Postgres can't be reached or the port is taken.
    """
    stop = asyncio.Event()
    stop_on_signals(stop)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(open_services(config))
        page = serving_page(
            config.listen_host, config.listen_port, services.reasons, services.metrics, concerns=services.concerns
        )
        url = await stack.enter_async_context(page)
        _log.info("publishing", sources=[publisher.source.name for publisher in services.publishers], page=url)
        notify("READY=1")
        await run_until_stopped(_tasks(services), stop, services.finish)


def _tasks(services: Services) -> dict[str, Coroutine[Any, Any, None]]:
    tasks = {f"publisher of {publisher.source.name}": publisher.run() for publisher in services.publishers}
    tasks["upkeep"] = services.upkeep.run()
    tasks["job retention"] = services.job_retention.run()
    if services.orphan_check is not None:
        tasks["orphan check"] = services.orphan_check.run()
    if services.webhooks is not None:
        tasks["webhooks"] = services.webhooks.run()
    if services.jobs is not None:
        tasks["jobs"] = services.jobs.run()
    if managed():
        tasks["status"] = _tell_status(services)
    if (seconds := watchdog_seconds()) is not None:
        tasks["watchdog"] = answer_watchdog(seconds / 2)
    return tasks


async def _tell_status(services: Services) -> None:
    while True:
        waiting = [f"{backlog.count} {source} wait" for source, backlog in (await services.backlogs()).items()]
        notify(f"STATUS={', '.join(waiting) or 'Postgres does not answer'}", patience=0)
        await asyncio.sleep(_STATUS_SECONDS)
