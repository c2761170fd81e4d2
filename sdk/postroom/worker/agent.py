"""An agent as a process: config → NATS → event store → consume → wait → finish what is in hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from nats.aio.client import Client

from postroom._wire.retry import Patience, retrying
from postroom.agent import Agent, agent_name, fill_subjects
from postroom.chassis import logs
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.runtime import answer_watchdog, notify, run_until_stopped, stop_on_signals, watchdog_seconds
from postroom.chassis.runtime import run as run_program
from postroom.delivery.agents.consumers import check_events, open_consumers
from postroom.delivery.agents.runtime import AgentRuntime
from postroom.delivery.consumer import Attempts, Consumer
from postroom.delivery.consumers import run_alone
from postroom.delivery.nats import connect
from postroom.errors import PostroomError
from postroom.worker.agent_config import AgentConfig, state_directory
from postroom.worker.agent_metrics import expose
from postroom.worker.page import serving_page

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Services:
    """What one agent process is made of."""

    config: AgentConfig
    nats: Client
    runtime: AgentRuntime
    consumers: list[Consumer]

    def reasons(self) -> list[str]:
        """Return what keeps it from handling messages now."""
        nats = [] if self.nats.is_connected else ["nats_unavailable"]
        return [*nats, *(consumer.trouble for consumer in self.consumers if consumer.trouble is not None)]

    async def metrics(self) -> bytes:
        """Return the metrics as text."""
        return expose(self.runtime, [consumer.counters for consumer in self.consumers])

    async def finish(self) -> None:
        """Take nothing more and finish what is in hand; what can't be published now waits in the store."""
        notify("STOPPING=1")
        try:
            async with asyncio.timeout(self.config.stop_seconds):
                await asyncio.gather(*(consumer.stop() for consumer in self.consumers))
        except TimeoutError:
            _log.warning("stopped_with_messages_in_hand", seconds=self.config.stop_seconds)


def main(agent: type[Agent[Any]], config: AgentConfig) -> None:
    """Run the agent until a signal says stop; raises `Fatal`."""
    logs.configure(config.log_level)
    run_program(run(agent, config))


async def run(agent: type[Agent[Any]], config: AgentConfig) -> None:
    """Handle messages until SIGTERM or SIGINT.

    Raises `Fatal`: 78 for a wrong agent, config or store, 69 where NATS can't be reached, 75 without a stream, 74
    where the disk failed under a commit.
    """
    stop = asyncio.Event()
    stop_on_signals(stop)
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(open_services(agent, config))
        page = serving_page(config.listen_host, config.listen_port, services.reasons, services.metrics)
        url = await stack.enter_async_context(page)
        _log.info("ready", agent=agent_name(agent), position=services.runtime.position, page=url)
        notify("READY=1")
        await run_until_stopped(_tasks(services), stop, services.finish)


@asynccontextmanager
async def open_services(agent: type[Agent[Any]], config: AgentConfig) -> AsyncIterator[Services]:
    """Build everything, and close it; raises `Fatal`."""
    subjects = fill_subjects(agent, config.tenant, config.workspace)
    async with AsyncExitStack() as stack:
        try:
            nats = await connect(config.nats, name=f"postroom-agent {agent_name(agent)}", patience=config.start_seconds)
            stack.push_async_callback(nats.close)
            js = nats.jetstream()
            runtime = await AgentRuntime.open(
                agent,
                js,
                state_directory(config, agent_name(agent)),
                tenant=config.tenant,
                workspace=config.workspace,
                settings=config.agent,
                attempts=Attempts(config.max_deliver, config.backoff.schedule),
            )
            stack.push_async_callback(runtime.close)
            # A worker that starts beside it may be about to declare the streams.
            patience = Patience(config.start_seconds)
            consumers = await retrying(lambda: open_consumers(js, runtime, subjects, config.consumer(agent)), patience)
            await retrying(lambda: check_events(js, agent, config.tenant, config.workspace), patience)
        except PostroomError as error:
            raise Fatal(_exit(error), str(error)) from error
        yield Services(config=config, nats=nats, runtime=runtime, consumers=consumers)


def _tasks(services: Services) -> dict[str, Coroutine[Any, Any, None]]:
    tasks = {"agent": services.runtime.run()}
    for number, consumer in enumerate(services.consumers, 1):
        tasks[f"consumer {number}"] = run_alone(consumer)
    if (seconds := watchdog_seconds()) is not None:
        tasks["watchdog"] = answer_watchdog(seconds / 2)
    return tasks


def _exit(error: PostroomError) -> Exit:
    if error.code == "stream_not_found":  # whoever declares it may only be starting
        return Exit.TRY_AGAIN
    return Exit.UNAVAILABLE if error.retryable else Exit.CONFIG
