"""Every webhook of a database, each with its consumer: what is registered begins, what is deleted ends, by polling.

A consumer goes from JetStream when its webhook is gone: each worker deletes it after it has stopped its own part of it,
so the last one does for good; what a killed worker left behind, the next to start deletes. Its rows in the inbox go
too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import structlog
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom.chassis.exits import Fatal
from postroom.chassis.postgres import Pool
from postroom.chassis.sql import load_queries
from postroom.delivery.consumers import Consumers
from postroom.delivery.consuming import ConsumerCounters
from postroom.delivery.http.addresses import Guard
from postroom.delivery.settings import NatsSettings
from postroom.delivery.streams import all_consumers
from postroom.delivery.subjects import event_subject
from postroom.delivery.webhooks.consumer import PREFIX, Webhook, WebhookConsumer
from postroom.delivery.webhooks.settings import WebhookSettings

_log = structlog.get_logger(__name__)

QUERIES: Final = load_queries("postroom.delivery.webhooks")

STRETCH: Final = 4096  # blocks of the inbox that one look reads for what to forget


class Webhooks:
    """The webhooks of one database: `run` it as a task."""

    def __init__(self, pool: Pool, nats: NatsSettings, settings: WebhookSettings, guard: Guard) -> None:
        self._consumers: Consumers[str, WebhookConsumer] = Consumers(  # by the webhook's id
            nats, name="postroom-worker webhooks", check_seconds=settings.check_seconds
        )
        self._pool = pool
        self._settings = settings
        self._guard = guard
        self._unusable: set[str] = set()
        self._strays: set[tuple[str, str]] | None = None  # stream and name of consumers to delete; None: not looked yet
        self._block: int | None = 0  # of the inbox, where to go on looking for rows of webhooks that are gone

    async def run(self) -> None:
        """Deliver until `stop`; NATS or Postgres away ends one look, no more."""
        await self._consumers.run(self._look)

    async def stop(self) -> None:
        """Begin no further request, and wait for those under way."""
        await self._consumers.stop()

    @property
    def running(self) -> Mapping[str, WebhookConsumer]:
        """Those that are delivered to, by id."""
        return self._consumers.running

    @property
    def counters(self) -> ConsumerCounters:
        """What all of them have done since the start."""
        return self._consumers.counters

    @property
    def trouble(self) -> str | None:
        """What keeps messages from arriving; None where nothing does."""
        return self._consumers.trouble

    async def _look(self, js: JetStreamContext) -> None:
        """Begin what is new, end what is gone, delete what was left."""
        wanted = {row["id"]: Webhook(**row) for row in await self._pool.fetch(QUERIES["list_webhooks"])}
        if self._strays is None:
            self._strays = await self._find_strays(js)
        for key in self.running.keys() - wanted.keys():
            gone = await self._end(key)
            self._strays.add((gone.stream, gone.webhook.durable))
        for key in wanted.keys() - self.running.keys() - self._unusable:
            await self._begin(js, wanted[key])
        for stream, durable in list(self._strays):
            await self._delete(js, stream, durable)
            self._strays.discard((stream, durable))
            self._block = 0
        if self._block is not None:
            self._block = await self._forget_removed(self._block)

    async def _begin(self, js: JetStreamContext, webhook: Webhook) -> None:
        try:
            stream = await js.find_stream_name_by_subject(event_subject(webhook.mesh, webhook.topic))
        except NotFoundError:
            return  # nobody has declared it yet: the next look will find it
        try:
            begun = WebhookConsumer(webhook, js, stream, pool=self._pool, settings=self._settings, guard=self._guard)
        except Fatal as error:  # one row that is no good stops neither the others nor the worker
            self._unusable.add(webhook.id)
            _log.error("webhook_unusable", webhook=webhook.id, error=str(error))
            return
        self._consumers.begin(webhook.id, begun)
        _log.info("webhook_begun", webhook=webhook.id, stream=stream)

    async def _end(self, key: str) -> WebhookConsumer:
        ended = await self._consumers.end(key)
        _log.info("webhook_ended", webhook=key)
        return ended

    async def _delete(self, js: JetStreamContext, stream: str, durable: str) -> None:
        with suppress(NotFoundError):
            await js.delete_consumer(stream, durable)

    async def _forget_removed(self, block: int) -> int | None:
        """Forget what webhooks that are gone were posted, in a stretch of the inbox; return where the next begins."""
        blocks = await self._pool.fetchval(QUERIES["count_blocks"])
        end = block + STRETCH
        await self._pool.execute(QUERIES["forget_removed"], (block, 0), (end, 0))
        return end if end < blocks else None

    async def _find_strays(self, js: JetStreamContext) -> set[tuple[str, str]]:
        """Find the consumers of webhooks that went while no worker ran.

        The webhooks are read after the consumers: one that another worker makes meanwhile has its row by then.
        """
        found = set()
        for row in await self._pool.fetch(QUERIES["list_meshes"]):
            with suppress(NotFoundError):
                stream = await js.find_stream_name_by_subject(f"{row['slug']}.event.>")
                names = [info.name for info in await all_consumers(js, stream)]
                found |= {(stream, name) for name in names if name.startswith(PREFIX)}
        known = {PREFIX + row["id"] for row in await self._pool.fetch(QUERIES["list_webhooks"])}
        return {(stream, name) for stream, name in found if name not in known}
