"""A consumer with an HTTP handler as a process: config → Postgres, NATS → consume → wait → finish what is in hand."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, Final

import structlog

from postroom.chassis import logs
from postroom.chassis.runtime import (
    answer_watchdog,
    managed,
    notify,
    run_until_stopped,
    stop_on_signals,
    watchdog_seconds,
)
from postroom.chassis.runtime import run as run_program
from postroom.delivery.consumers import run_alone
from postroom.worker.consumer_config import ConsumerConfig
from postroom.worker.consumer_services import Services, open_services
from postroom.worker.page import serving_page

_log = structlog.get_logger(__name__)

_STATUS_SECONDS: Final = 5.0


def main(config: ConsumerConfig) -> None:
    """Consume until a signal says stop; raises `Fatal`."""
    logs.configure(config.log_level)
    run_program(run(config))


async def run(config: ConsumerConfig) -> None:
    """Consume until SIGTERM or SIGINT, then finish the calls under way.

    Raises `Fatal`: 78 for a wrong config or schema, 69 where Postgres or NATS can't be reached.
    """
    stop = asyncio.Event()
    stop_on_signals(stop)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(open_services(config))
        page = serving_page(config.listen_host, config.listen_port, services.reasons, services.metrics)
        url = await stack.enter_async_context(page)
        _log.info("consuming", consumer=config.consumer.durable, stream=config.consumer.stream, page=url)
        notify("READY=1")
        await run_until_stopped(_tasks(services), stop, services.finish)


def _tasks(services: Services) -> dict[str, Coroutine[Any, Any, None]]:
    tasks = {
        "consumer": run_alone(services.consumer),
        "leases": services.handler.leases.run(),
        "retention": services.retention.run(),
    }
    if managed():
        tasks["status"] = _tell_status(services)
    if (seconds := watchdog_seconds()) is not None:
        tasks["watchdog"] = answer_watchdog(seconds / 2)
    return tasks


async def _tell_status(services: Services) -> None:
    while True:
        backlog = await services.backlog()
        waiting = "an unknown number of" if backlog is None else backlog.messages
        under_way = services.handler.counters.calls_under_way
        paused = "" if services.handler.reach.error is None else f"; paused: {services.handler.reach.error}"
        notify(f"STATUS={waiting} messages waiting, {under_way} being handled{paused}", patience=0)
        await asyncio.sleep(_STATUS_SECONDS)
