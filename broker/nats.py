"""NATS, for what operators ask: a connection for one request, since accepting needs none.

Where there is none, the request is answered with what Postgres knows, and says what is missing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Final

from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, DeliverPolicy

from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings
from postroom.delivery.streams import covers, filters_of
from postroom.errors import PostroomError, Unavailable

PATIENCE: Final = 5.0  # seconds that an operator waits for NATS
BRIEFLY: Final = 1.0  # seconds that a glance does


class Nats:
    """Lends connections."""

    def __init__(self, settings: NatsSettings | None) -> None:
        self._settings = settings

    @asynccontextmanager
    async def opened(self, patience: float) -> AsyncIterator[tuple[JetStreamContext | None, Unavailable | None]]:
        """Lend a connection, or say why there is none after `patience` seconds."""
        if self._settings is None:
            sentence = "the broker knows no NATS, so what is in streams alone is missing: set its nats.url"
            yield None, Unavailable.of("nats_not_configured", sentence)
            return
        try:
            nats = await connect(self._settings, name="postroom-broker", patience=patience, logged=False)
        except PostroomError as error:
            yield None, Unavailable.of("nats_unreachable", str(error))
            return
        try:
            yield nats.jetstream(), None
        finally:
            await nats.close()


def wants(info: ConsumerInfo, subject: str, published_at: datetime) -> bool:
    """Tell whether a consumer is given what was published on a subject at a time."""
    config = info.config
    since = config.opt_start_time if config.deliver_policy == DeliverPolicy.BY_START_TIME else None
    return (since is None or since <= published_at) and any(covers(one, subject) for one in filters_of(config))
