"""One webhook as a consumer: the HTTP handler of `delivery.http`, on its topic's events, with the webhook's secret.

Claims, leases, attempts, the table of answers and dead letters are those of every HTTP handler; every worker runs the
consumer, under one name, so that they share its work and one of them is enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from nats.js import JetStreamContext

from postroom.chassis.postgres import Pool
from postroom.delivery.consuming import DONE, Attempts, Consumer, ConsumerCounters, Delivery, Settle
from postroom.delivery.dead_letters import RecordedLetters
from postroom.delivery.http.addresses import Guard
from postroom.delivery.http.client import HandlerClient
from postroom.delivery.http.handler import LEASE_SHARE, HttpHandler
from postroom.delivery.http.inbox_messages import InboxMessages
from postroom.delivery.http.reach import Reach
from postroom.delivery.http.requests import occurred_at
from postroom.delivery.http.retention import InboxRetention
from postroom.delivery.http.settings import HandlerSettings
from postroom.delivery.settings import ConsumerSettings
from postroom.delivery.webhooks.settings import WebhookSettings

PREFIX: Final = "webhook__"  # of a durable's name; the webhook's id follows

_IN_HAND: Final = 100  # messages
_CLOCK_SKEW: Final = timedelta(minutes=10)  # by which the clocks of Postgres and NATS may differ


class Webhook(NamedTuple):
    """A row of `mesh.webhook`, with the names of what it belongs to."""

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


class WebhookConsumer:
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
    ) -> None:
        """`stream` is the one that holds the mesh's events. Raises `Fatal` for a URL that nothing can be posted to."""
        self.webhook = webhook
        self.stream = stream
        client_settings = HandlerSettings(
            url=webhook.url, timeout_seconds=settings.timeout_seconds, connect_seconds=settings.connect_seconds
        )
        self._client = HandlerClient(client_settings, secret=webhook.secret.encode(), guard=guard)
        inbox = InboxMessages(pool, webhook.durable, lease_seconds=settings.ack_wait_seconds * LEASE_SHARE)
        self._handler = HttpHandler(
            inbox,
            self._client,
            attempts=Attempts(settings.max_deliver, settings.backoff.schedule),
            calls_at_once=settings.calls_at_once,
        )
        self._consumer = Consumer(
            js,
            _consumer_settings(webhook, stream, settings),
            SinceRegistered(self._handler, webhook.created_at),
            RecordedLetters(pool, webhook.mesh),
        )
        self._retention = InboxRetention(pool, js, stream=stream, durable=webhook.durable, settings=settings.inbox)

    @property
    def counters(self) -> ConsumerCounters:
        """What it has done since it began."""
        return self._consumer.counters

    @property
    def reach(self) -> Reach:
        """Whether the webhook can be reached."""
        return self._handler.reach

    @property
    def trouble(self) -> str | None:
        """What keeps messages from arriving; None where nothing does."""
        return self._consumer.trouble

    async def run(self) -> None:
        """Deliver until stopped; raises `Unavailable` where the connection to NATS was closed for good."""
        beside = [asyncio.create_task(task) for task in (self._handler.leases.run(), self._retention.run())]
        try:
            await self._consumer.run()
        finally:
            for task in beside:
                task.cancel()
            await self._client.close()

    async def stop(self) -> None:
        """Begin no further request, and wait for those under way."""
        self._handler.stop()
        await self._consumer.stop()


class SinceRegistered:
    """Keeps from a webhook's handler what happened before it was registered, published late or again as it may be."""

    def __init__(self, handler: HttpHandler, since: datetime) -> None:
        self._handler = handler
        self._since = since

    @property
    def room(self) -> int | None:
        """As its handler has it."""
        return self._handler.room

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        """Settle what is older, and give the rest to the webhook's handler."""
        wanted = []
        for delivery in batch:
            if occurred_at(delivery) > self._since:
                wanted.append(delivery)
            else:
                await settle(delivery, DONE)
        await self._handler.handle(wanted, settle)


def _consumer_settings(webhook: Webhook, stream: str, settings: WebhookSettings) -> ConsumerSettings:
    return ConsumerSettings(
        stream=stream,
        durable=webhook.durable,
        filter_subjects=[f"{webhook.mesh}.event.{webhook.topic}.*"],
        ack_wait_seconds=settings.ack_wait_seconds,
        max_deliver=settings.max_deliver,
        max_ack_pending=_IN_HAND,
        batches_at_once=_IN_HAND,  # one slow call holds up nothing but its own place
        backoff=settings.backoff,
        since=webhook.created_at - _CLOCK_SKEW,
    )
