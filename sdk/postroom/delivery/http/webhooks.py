"""Every webhook of a database, each with its consumer: polling begins those that are registered and ends deleted ones.

A consumer is deleted from JetStream with its webhook: each worker deletes it after it has stopped its own part of it,
so the last one does it for all; what a killed worker left behind, the next to start deletes. Its rows in the inbox are
deleted too.
"""

import asyncio
from contextlib import suppress
from datetime import datetime
from typing import Final, NamedTuple

import structlog
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom._wire.programs import LATENCIES
from postroom._wire.retry import error_text
from postroom._wire.sql import load_queries
from postroom.chassis.exits import Fatal
from postroom.chassis.postgres import POSTGRES_ERRORS, Pool
from postroom.chassis.routes import Histogram
from postroom.chassis.runtime import end
from postroom.delivery.consumers import Consumers
from postroom.delivery.http.addresses import Guard
from postroom.delivery.http.client import HandlerClient
from postroom.delivery.http.handler import PostingConsumer
from postroom.delivery.nats import CLOCK_SKEW
from postroom.delivery.settings import ConsumerSettings, HandlerSettings, NatsSettings, WebhookSettings
from postroom.delivery.streams import all_consumers
from postroom.delivery.subjects import event_subject
from postroom.errors import NotFound, Unavailable

PREFIX: Final = "webhook__"  # of a durable's name; the webhook's id follows

_IN_HAND: Final = 100  # messages
_log = structlog.get_logger(__name__)

QUERIES: Final = load_queries(__package__, "webhooks.sql")

STRETCH: Final = 4096  # blocks of the inbox in which one look searches for rows to delete


class Webhook(NamedTuple):
    """A row of `mesh.webhook`, with the names of its mesh and its topic."""

    id: str
    mesh: str
    topic: str
    url: str
    secret: str
    created_at: datetime

    @property
    def durable(self) -> str:
        """The name of its consumer."""
        return PREFIX + self.id


class WebhookConsumer(PostingConsumer):
    """Delivers to one webhook: `run` it as a task, `stop` it before the connection is closed."""

    def __init__(
        self,
        webhook: Webhook,
        js: JetStreamContext,
        stream: str,
        *,
        pool: Pool,
        settings: WebhookSettings,
        guard: Guard,
        took: Histogram,
    ) -> None:
        """`stream` holds the mesh's events. Raises `Fatal` for a URL that cannot be posted to."""
        self.webhook = webhook
        self._pool = pool
        client_settings = HandlerSettings(
            url=webhook.url, timeout_seconds=settings.timeout_seconds, connect_seconds=settings.connect_seconds
        )
        self._client = HandlerClient(client_settings, secret=webhook.secret.encode(), guard=guard)
        consumer = ConsumerSettings(
            stream=stream,
            durable=webhook.durable,
            filter_subjects=[f"{webhook.mesh}.event.{webhook.topic}.*"],
            ack_wait_seconds=settings.ack_wait_seconds,
            max_deliver=settings.max_deliver,
            max_ack_pending=_IN_HAND,
            batches_at_once=_IN_HAND,  # one slow call holds up no other message
            backoff=settings.backoff,
            since=webhook.created_at - CLOCK_SKEW,
        )
        super().__init__(
            js,
            consumer,
            pool,
            self._client,
            mesh=webhook.mesh,
            calls_at_once=settings.calls_at_once,
            keep=settings.inbox,
            since=webhook.created_at,
            took=took,
        )

    async def made(self) -> None:
        """Raise `NotFound` where the webhook was deleted, `Unavailable` where Postgres cannot be asked.

        A worker that knows of the deletion has deleted the consumer, and the rows of what was posted. This one created
        the consumer again, and would get all messages again; instead it waits for its next look, which ends it.
        """
        try:
            there = await self._pool.fetchval(QUERIES["is_there"], self.webhook.id)
        except POSTGRES_ERRORS as error:
            detail = f"Postgres cannot be asked whether the webhook {self.webhook.id} still exists: {error_text(error)}"
            raise Unavailable.of("database_unavailable", detail, retryable=True) from error
        if not there:
            raise NotFound.of("webhook_not_found", f"the webhook {self.webhook.id} was deleted")

    async def run(self) -> None:
        """Deliver until stopped; raises `Unavailable` where the connection to NATS was closed permanently."""
        retention = asyncio.create_task(self.retention.run())
        try:
            await super().run()
        finally:
            await end({retention})
            await self._client.close()


class Webhooks(Consumers[str, WebhookConsumer]):
    """The webhooks of one database, by id: `run` it as a task."""

    def __init__(self, pool: Pool, nats: NatsSettings, settings: WebhookSettings, guard: Guard) -> None:
        super().__init__(nats, name="postroom-worker webhooks", check_seconds=settings.check_seconds)
        self.took = Histogram(LATENCIES)  # of all of them
        self._pool = pool
        self._settings = settings
        self._guard = guard
        self._unusable: set[str] = set()
        self._strays: set[tuple[str, str]] | None = None  # stream and name of consumers to delete; None: not known yet
        self._block: int | None = 0  # of the inbox, where the search for rows of deleted webhooks goes on

    async def look(self, js: JetStreamContext) -> None:
        """Begin new webhooks, end deleted ones, and delete what those left."""
        await self._pool.execute(QUERIES["set_back"])
        wanted = {row["id"]: Webhook(**row) for row in await self._pool.fetch(QUERIES["list_webhooks"])}
        if self._strays is None:
            self._strays = await self._find_strays(js)
        for key in self.running.keys() - wanted.keys():
            gone = await self.end(key)
            _log.info("webhook_ended", webhook=key)
            self._strays.add((gone.stream, gone.webhook.durable))
        for key in [key for key, kept in self.running.items() if kept.webhook != wanted[key]]:
            await self.end(key)  # it begins again below, with its new time
        for key in wanted.keys() - self.running.keys() - self._unusable:
            webhook = wanted[key]
            try:
                stream = await js.find_stream_name_by_subject(event_subject(webhook.mesh, webhook.topic))
                begun = WebhookConsumer(
                    webhook, js, stream, pool=self._pool, settings=self._settings, guard=self._guard, took=self.took
                )
            except NotFoundError:
                continue  # it is not declared yet: the next look will find it
            except Fatal as error:  # an unusable row stops neither the others nor the worker
                self._unusable.add(key)
                _log.error("webhook_unusable", webhook=key, error=str(error))
                continue
            self.begin(key, begun)
            _log.info("webhook_begun", webhook=key, stream=stream)
        for stream, durable in list(self._strays):
            with suppress(NotFoundError):
                await js.delete_consumer(stream, durable)
            self._strays.discard((stream, durable))
            self._block = 0
        if self._block is not None:  # delete the rows of deleted webhooks in a stretch of the inbox
            blocks, end = await self._pool.fetchval(QUERIES["count_blocks"]), self._block + STRETCH
            await self._pool.execute(QUERIES["forget_removed"], (self._block, 0), (end, 0))
            self._block = end if end < blocks else None

    async def _find_strays(self, js: JetStreamContext) -> set[tuple[str, str]]:
        """Find the consumers of webhooks that were deleted while no worker ran.

        The webhooks are read after the consumers: a consumer that another worker creates meanwhile has its row by then.
        """
        found = set()
        for row in await self._pool.fetch(QUERIES["list_meshes"]):
            with suppress(NotFoundError):
                stream = await js.find_stream_name_by_subject(f"{row['slug']}.event.>")
                names = [info.name for info in await all_consumers(js, stream)]
                found |= {(stream, name) for name in names if name.startswith(PREFIX)}
        known = {PREFIX + row["id"] for row in await self._pool.fetch(QUERIES["list_webhooks"])}
        return {(stream, name) for stream, name in found if name not in known}
