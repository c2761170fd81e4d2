"""A worker as a process: its parts, each built from its config, one page, one stop.

A part is a database that is published from, a consumer, or an agent. The first loop of any of them that ends too early
ends the process. Any number of workers may run the same parts: what one has claimed, the others leave alone.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Final, TypeAlias

import structlog
from aiohttp import web
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from postroom._wire.programs import ProgramPart, Report, Status
from postroom.agent import agent_name
from postroom.chassis import logs, runtime, tracing
from postroom.chassis.listener import listening, running
from postroom.chassis.postgres import Pool, letting_go
from postroom.chassis.routes import bare_application, exposition, json_response
from postroom.chassis.runtime import Reporter, keep_reporting, lines
from postroom.delivery.agents import load_agent
from postroom.delivery.nats import usable
from postroom.delivery.programs import PostgresReports
from postroom.worker.agent import RunningAgent, open_agent
from postroom.worker.config import WorkerConfig, check_distinct
from postroom.worker.consumer import HttpConsumer, open_consumer
from postroom.worker.metrics import labelled, merged
from postroom.worker.publication import Publication, open_publication, open_source

_log = structlog.get_logger(__name__)

_STATUS_SECONDS: Final = 5.0
_BEGIN_SECONDS: Final = 2.0  # that a start may take before it is reported as degraded
_LOOK_SECONDS: Final = 0.02
_PAGE_CONNECTIONS: Final = 64
_PAGE_SECONDS: Final = 1.0  # for answers at work
_LEAVE_SECONDS: Final = 10.0  # after `stop_seconds`: to close connections, which takes 5 at most, and stores


Part: TypeAlias = Publication | HttpConsumer | RunningAgent


def run(config: WorkerConfig) -> None:
    """Work until SIGTERM or SIGINT, then finish what is in hand.

    Raises `Fatal`: 78 for a wrong config, schema, stream or class, 69 where a server can't be reached or the port is
    taken, 75 where a stream is missing.
    """
    logs.configure(config.log_level)
    with tracing.exporting("postroom-worker"):
        runtime.run(_run(config))


async def _run(config: WorkerConfig) -> None:
    stop = asyncio.Event()
    runtime.stop_on_signals(stop, patience=config.stop_seconds + _LEAVE_SECONDS)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(letting_go(stop))
        opening = asyncio.create_task(stack.enter_async_context(open_parts(config)), name="opening")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if stop.is_set():  # it may still wait for servers; what is open already is closed
            await runtime.end({opening})
            return
        parts = opening.result()
        url = await stack.enter_async_context(serving_page(config.listen_host, config.listen_port, parts))
        for part in parts:
            part.announce(url)
        runtime.notify("READY=1")
        tasks = {_said(parts, part, name): task for part in parts for name, task in part.tasks().items()}
        if (pool := next((part.pool for part in parts if part.pool is not None), None)) is not None:
            tasks["reports"] = _report(parts, url, pool)
        if runtime.managed():
            tasks["status"] = _notify_status(parts)

        async def finish() -> None:
            runtime.notify("STOPPING=1")
            try:
                async with asyncio.timeout(config.stop_seconds):
                    await asyncio.gather(*(part.finish() for part in parts))
            except TimeoutError:
                _log.warning("stopped_with_work_in_hand", seconds=config.stop_seconds)

        await runtime.run_until_stopped(tasks, stop, finish, patience=_LEAVE_SECONDS)


@asynccontextmanager
async def open_parts(config: WorkerConfig) -> AsyncIterator[Sequence[Part]]:
    """Build every part, and close it; raises `Fatal`."""
    usable(config.nats)  # while it runs, a file that cannot be read is waited for
    agents = [(load_agent(section.agent_class or ""), section) for section in config.agents]
    places = [f"{section.tenant}.{section.workspace}.{agent_name(agent)}" for agent, section in agents]
    check_distinct(places, "agents: two have the same name, tenant and workspace; rename one")
    parts: list[Part] = []
    async with AsyncExitStack() as stack:
        publication = None
        if config.database_url is not None:
            publication = await stack.enter_async_context(open_publication(config))
            parts.append(publication)
            if config.consumers or agents:
                await publication.upkeep.declare_first()
        opened: list[AbstractAsyncContextManager[Part]] = [
            open_source(each, config, publication) for each in config.sources
        ]
        opened += [open_consumer(each, config) for each in config.consumers]
        opened += [open_agent(agent, section, config.nats) for agent, section in agents]
        parts += [await stack.enter_async_context(each) for each in opened]
        yield parts


@asynccontextmanager
async def serving_page(host: str, port: int | None, parts: Sequence[Part]) -> AsyncIterator[str | None]:
    """Serve `/health`, `/ready` and `/metrics`, and yield their URL; None, and no page, where `port` is None.

    The reasons of parts are in `/health` and `/ready`, which answers 503 then; their concerns are in `/health` only,
    and do not change the status code. Raises `Fatal` (69) where the port is taken.
    """
    if port is None:
        yield None
        return

    async def health(request: web.Request) -> web.Response:
        found, status = [_said(parts, part, reason) for part in parts for reason in part.reasons()], 200
        if request.path == "/health":
            found += [_said(parts, part, concern) for part in parts for concern in part.concerns()]
        elif found:
            status = 503
        return json_response({"status": "degraded" if found else "ok", "reasons": found}, status)

    async def scrape(_request: web.Request) -> web.Response:
        families: list[Metric] = []
        for part in parts:
            families += labelled(await part.metrics(), part.labels if len(parts) > 1 else {})
        return web.Response(body=exposition(merged(families)), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = bare_application()
    app.router.add_get("/health", health)
    app.router.add_get("/ready", health)
    app.router.add_get("/metrics", scrape)

    # the descriptors of the process are for its work
    def on_drop(reason: str) -> None:
        _log.debug("connection_dropped", reason=reason)

    async with running(app, _PAGE_SECONDS, most=_PAGE_CONNECTIONS, on_drop=on_drop) as runner:
        yield await listening(runner, host, port)


async def _report(parts: Sequence[Part], page: str | None, pool: Pool) -> None:
    """Report the state of the parts, in the database of the first that has one, until cancelled."""
    reporter = Reporter("postroom", page)
    reports = PostgresReports(pool, "worker", ", ".join(part.name for part in parts))

    def glance() -> tuple[tuple[str, ...], ...]:
        return tuple((*part.reasons(), *part.concerns()) for part in parts)

    async def look() -> Report:
        found = [
            ProgramPart(name=part.name, reasons=lines(reasons), flows=sorted(part.flows))
            for part, reasons in zip(parts, glance(), strict=True)
        ]
        totals: Counter[str] = Counter()
        for part in parts:
            totals.update(part.totals())
        status: Status = "degraded" if any(part.reasons for part in found) else "ok"
        return reporter.report([], status=status, parts=found, totals=totals)

    with suppress(TimeoutError):
        async with asyncio.timeout(_BEGIN_SECONDS):
            while any(glance()):  # noqa: ASYNC110 - it is polled afterwards too
                await asyncio.sleep(_LOOK_SECONDS)
    try:
        await keep_reporting(look, reports.keep, glance)
    finally:
        await asyncio.shield(reports.withdraw())


async def _notify_status(parts: Sequence[Part]) -> None:
    while True:
        said = [_said(parts, part, status) for part in parts if (status := await part.status()) is not None]
        if said:
            runtime.notify(f"STATUS={'; '.join(said)}", patience=0)
        await asyncio.sleep(_STATUS_SECONDS)


def _said(parts: Sequence[Part], part: Part, text: str) -> str:
    """Add the name of the part to a text, where there are several."""
    return f"{part.name}: {text}" if len(parts) > 1 else text
