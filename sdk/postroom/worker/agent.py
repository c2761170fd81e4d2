"""An agent: NATS, event store and consumers, by its section of the config."""

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import structlog
from nats.aio.client import Client
from prometheus_client.core import Metric

from postroom._wire.retry import Patience, retrying
from postroom.agent import Agent, agent_name, fill_subjects
from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.agents import database
from postroom.delivery.agents.outgoing import into_jetstream
from postroom.delivery.agents.replay import answer_stories
from postroom.delivery.agents.runtime import AgentRuntime, check_events, open_consumers
from postroom.delivery.consumer import Attempts, Consumer
from postroom.delivery.consumers import run_alone
from postroom.delivery.nats import connect, trouble_of
from postroom.delivery.programs import latency_totals
from postroom.delivery.settings import NatsSettings
from postroom.errors import PostroomError
from postroom.worker.config import AgentSection, state_directory
from postroom.worker.metrics import of_agent

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class RunningAgent:
    """A running agent and its parts."""

    agent: str
    config: AgentSection
    nats: Client
    runtime: AgentRuntime
    consumers: list[Consumer]
    pool: ClassVar[None] = None
    flows: ClassVar[Collection[str]] = ()

    @property
    def name(self) -> str:
        """Its name among the parts of a process."""
        return f"agent {self.config.tenant}.{self.config.workspace}.{self.agent}"

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels that distinguish its metrics from those of other parts."""
        return {"mesh": self.config.tenant, "workspace": self.config.workspace, "agent": self.agent}

    def totals(self) -> dict[str, int]:
        """Return what it has done since it started."""
        return {
            "handled": sum(consumer.counters.done for consumer in self.consumers),
            "dead_lettered": sum(consumer.counters.dead_lettered for consumer in self.consumers),
            **latency_totals(*(consumer.took for consumer in self.consumers)),
        }

    def reasons(self) -> list[str]:
        """Return what keeps it from handling messages now."""
        troubles = (trouble_of(self.nats), self.runtime.trouble, *(consumer.trouble for consumer in self.consumers))
        return [trouble for trouble in troubles if trouble is not None]

    def concerns(self) -> list[str]:
        """Return nothing: all that can be wrong keeps it from handling messages, and is a reason."""
        return []

    async def status(self) -> str | None:
        """Return None: an agent does not know its backlog."""
        return None

    def announce(self, page: str | None) -> None:
        """Log that it begins."""
        _log.info("ready", agent=self.agent, position=self.runtime.position, page=page)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what runs until the stop, by name."""
        consumers = {f"consumer {number}": run_alone(consumer) for number, consumer in enumerate(self.consumers, 1)}
        return {"agent": self.runtime.run(), **consumers}

    async def metrics(self) -> list[Metric]:
        """Return its metrics."""
        return of_agent(self.runtime, [consumer.counters for consumer in self.consumers])

    async def finish(self) -> None:
        """Take no more messages and finish those in hand; what can't be published now waits in the store."""
        self.runtime.stop()
        try:
            async with asyncio.timeout(self.config.stop_seconds):
                await asyncio.gather(*(consumer.stop() for consumer in self.consumers))
        except TimeoutError:
            _log.warning("stopped_with_messages_in_hand", seconds=self.config.stop_seconds)


@asynccontextmanager
async def open_agent(
    agent: type[Agent[Any]], config: AgentSection, settings: NatsSettings
) -> AsyncIterator[RunningAgent]:
    """Build everything, and close it.

    Raises `Fatal`: 78 for a wrong agent, config or store, 69 where NATS can't be reached, 75 without a stream, 74
    where the disk failed during a commit.
    """
    subjects = fill_subjects(agent, config.tenant, config.workspace)
    async with AsyncExitStack() as stack:
        try:
            nats = await connect(settings, name=f"postroom-agent {agent_name(agent)}", patience=config.start_seconds)
            stack.push_async_callback(nats.close)
            js, directory = nats.jetstream(), state_directory(config, agent_name(agent))
            runtime = await AgentRuntime.open(
                agent,
                into_jetstream(js, settings, config.agent),
                directory,
                tenant=config.tenant,
                workspace=config.workspace,
                settings=config.agent,
                attempts=Attempts(config.max_deliver, config.backoff.schedule),
            )
            stack.push_async_callback(runtime.close)
            # A worker that starts at the same time may be about to declare the streams.
            patience = Patience(config.start_seconds)
            consumers = await retrying(lambda: open_consumers(js, runtime, subjects, config.consumer(agent)), patience)
            await retrying(lambda: check_events(js, agent, config.tenant, config.workspace), patience)
            await answer_stories(nats, config.tenant, config.consumer(agent).durable, database(directory))
        except PostroomError as error:
            code = Exit.UNAVAILABLE if error.retryable else Exit.CONFIG
            if error.code == "stream_not_found":  # the worker that declares it may still be starting
                code = Exit.TRY_AGAIN
            raise Fatal(code, str(error)) from error
        yield RunningAgent(agent=agent_name(agent), config=config, nats=nats, runtime=runtime, consumers=consumers)
