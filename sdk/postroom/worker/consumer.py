"""A consumer with an HTTP handler: connections, inbox, calls and sweep, by its section of the config."""

from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import msgspec
import structlog
from nats.aio.client import Client
from prometheus_client.core import Metric

from postroom._wire.words import counted
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import POSTGRES_ERRORS, Pool, close_pool
from postroom.delivery.consumers import run_alone
from postroom.delivery.http.client import HandlerClient
from postroom.delivery.http.handler import PostingConsumer
from postroom.delivery.http.inbox_messages import Backlog, get_inbox_backlog, open_inbox_pool
from postroom.delivery.nats import connect, trouble_of
from postroom.delivery.programs import latency_totals
from postroom.delivery.streams import ensure_stream, subjects_of
from postroom.errors import Conflict, PostroomError
from postroom.worker.config import ConsumerSection, WorkerConfig
from postroom.worker.metrics import of_consumer

_log = structlog.get_logger(__name__)

_NATS_PATIENCE: Final = 20.0  # seconds; then the process ends, and its supervisor starts it again


@dataclass(frozen=True, kw_only=True)
class HttpConsumer:
    """A running consumer and its parts."""

    config: ConsumerSection
    pool: Pool
    nats: Client
    consumer: PostingConsumer
    subjects: Sequence[str]
    flows: ClassVar[Collection[str]] = ()

    @property
    def name(self) -> str:
        """Its name among the parts of a process."""
        return f"consumer {self.config.consumer.durable}"

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels that distinguish its metrics from those of other parts."""
        return {"consumer": self.config.consumer.durable}

    def totals(self) -> dict[str, int]:
        """Return what it has done since it started."""
        counters = self.consumer.counters
        handled = {"handled": counters.done, "dead_lettered": counters.dead_lettered}
        return handled | latency_totals(self.consumer.took)

    def reasons(self) -> list[str]:
        """Return what keeps it from consuming now."""
        postgres = ["Postgres is unreachable"] if self.consumer.inbox.waiting_for_postgres else []
        troubles = (trouble_of(self.nats), self.consumer.handler.reach.error, self.consumer.trouble)
        return [*postgres, *(trouble for trouble in troubles if trouble is not None)]

    async def backlog(self) -> Backlog | None:
        """Return the consumer's backlog; None where Postgres cannot be asked."""
        try:
            return await get_inbox_backlog(self.pool, self.config.consumer.durable, self.subjects)
        except POSTGRES_ERRORS:
            return None

    def concerns(self) -> list[str]:
        """Return nothing: all that can be wrong keeps it from consuming, and is a reason."""
        return []

    async def metrics(self) -> list[Metric]:
        """Return its metrics."""
        return of_consumer(self.consumer, await self.backlog())

    async def status(self) -> str:
        """Return what waits, and whether calls pause."""
        backlog = await self.backlog()
        waiting = "an unknown number of messages" if backlog is None else counted(backlog.messages, "message")
        handler = self.consumer.handler
        paused = "" if handler.reach.error is None else f"; paused: {handler.reach.error}"
        return f"{waiting} waiting, {handler.counters.calls_under_way} being handled{paused}"

    def announce(self, page: str | None) -> None:
        """Log that it begins."""
        _log.info("consuming", consumer=self.config.consumer.durable, stream=self.config.consumer.stream, page=page)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what runs until the stop, by name."""
        return {"consumer": run_alone(self.consumer), "retention": self.consumer.retention.run()}

    async def finish(self) -> None:
        """Take no more messages, begin no further call, and wait for those under way."""
        await self.consumer.stop()


@asynccontextmanager
async def open_consumer(config: ConsumerSection, worker: WorkerConfig) -> AsyncIterator[HttpConsumer]:
    """Build everything, and close it; raises `Fatal`."""
    settings = config.consumer
    name = f"postroom-consumer {settings.durable}"
    async with AsyncExitStack() as stack:
        client = HandlerClient(config.handler)
        stack.push_async_callback(client.close)
        pool = await open_inbox_pool(config.database_url or worker.database, name=name, connections=config.connections)
        stack.push_async_callback(close_pool, pool)
        try:
            nats = await connect(worker.nats, name=name, patience=_NATS_PATIENCE)
        except PostroomError as error:
            raise Fatal(Exit.UNAVAILABLE, str(error)) from error
        stack.push_async_callback(nats.close)
        try:
            for stream in config.streams:
                await ensure_stream(nats.jetstream(), stream)
        except PostroomError as error:
            raise Fatal(Exit.TRY_AGAIN if error.retryable else Exit.CONFIG, str(error)) from error
        # The calls are limited, not the batches: one slow call holds up no other message.
        unlimited = msgspec.structs.replace(settings, batches_at_once=settings.max_ack_pending)
        consumer = PostingConsumer(
            nats.jetstream(),
            unlimited,
            pool,
            client,
            mesh=config.context,
            calls_at_once=config.handler.calls_at_once,
            keep=config.inbox,
            stream=config.stream,
        )
        try:
            await consumer.declare()
        except Conflict as error:
            raise Fatal(Exit.TRY_AGAIN if error.retryable else Exit.CONFIG, str(error)) from error
        except PostroomError as error:  # the stream is not declared yet, or NATS is not ready: `run` tries again
            _log.warning("consumer_waits", consumer=consumer.durable, detail=str(error))
        subjects = await subjects_of(nats.jetstream(), settings)
        yield HttpConsumer(config=config, pool=pool, nats=nats, consumer=consumer, subjects=subjects)
