"""The publisher: moves a source's rows into JetStream (docs/contract/delivery.md#delivery-16).

One transaction claims a batch, publishes it, and marks what the server has acknowledged:

    claim    the advisory locks of some aggregates, then their oldest rows with FOR UPDATE SKIP LOCKED
    publish  pipelined on one connection, each message under its own id (`Nats-Msg-Id`)
    mark     published_at and the place in the stream; or the attempt, the error and the time of the next one

Killed before the publish, nothing has happened; after it, the rows are unpublished still, and the next publisher sends
them again under the same ids, which the stream swallows within its duplicate window, and every inbox after that. What
it swallows and has no longer is published once more, under the next epoch.

The order of an aggregate is kept, however many publishers there are:

- Its advisory lock is held from before its rows are read until their marks are committed. A second statement reads
  them: its snapshot is later than the lock, so that it sees all that the lock's last holder has committed.
- Only an unbroken beginning of its unpublished rows is sent. Behind a row that is not due yet, is held by somebody
  else, or cannot be published at all, its other rows wait; other aggregates do not.
- Of a batch that breaks off, a beginning is in the stream (see `Link`); the rest is sent again, in order.

One case remains: a server that refuses one message for want of space and then takes a later one of the same batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from typing import Final

import asyncpg
import structlog

from postroom._wire.retry import Backoff
from postroom.chassis.postgres import UNREACHABLE, Pool
from postroom.delivery.publishing.link import Link
from postroom.delivery.publishing.pace import Pace
from postroom.delivery.publishing.queue_state import read_holes
from postroom.delivery.publishing.settings import PublisherSettings
from postroom.delivery.publishing.source import Outgoing, Place, Source
from postroom.delivery.settings import NatsSettings
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

_MANY: Final = 100  # rows: a batch that large has a backlog behind it, and no pause after it
_TROUBLE_SECONDS: Final = 0.5  # between two tries to reach NATS or Postgres
_REFRESH_SECONDS: Final = 5.0  # how old the picture of the streams may be

_Failures = list[tuple[Outgoing, str]]


@dataclass
class PublisherCounters:
    """What a publisher has done since it started."""

    published: int = 0
    failed: int = 0
    batches: int = 0
    trouble: str | None = "it has not begun"  # what stands in the way, as a sentence


class Publisher:
    """Publishes one source; any number may run, in one process or many."""

    def __init__(
        self,
        pool: Pool,
        source: Source,
        settings: PublisherSettings,
        nats: NatsSettings,
        *,
        horizon: timedelta,
        opened: Callable[[Link], Awaitable[object]],
        rng: Random,
    ) -> None:
        """Call `opened` with each new connection, before anything is published on it."""
        self.source = source
        self.counters = PublisherCounters()
        self._pool = pool
        self._settings = settings
        self._nats = nats
        self._horizon = horizon
        self._opened = opened
        self._rng = rng
        self._link: Link | None = None
        self._looked = 0.0
        self._after = source.lowest
        self._working = asyncio.Lock()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Publish until `stop`; NATS or Postgres away is waited out."""
        clock, pace = asyncio.get_running_loop().time, Pace(self._settings.idle_seconds)
        while not self._stop.is_set():
            try:
                async with self._working:
                    moved = await self.step()
                pause = pace.rest(clock(), moved=moved > 0)
                self.counters.trouble = None
            except (PostroomError, asyncpg.PostgresError, *UNREACHABLE) as error:
                self._troubled(str(error) or type(error).__name__)
                pause, moved = _TROUBLE_SECONDS, 0
            if moved < _MANY:
                await self._rest(pause)

    async def stop(self) -> None:
        """Finish the batch in hand and close the connection; harmless a second time."""
        self._stop.set()
        async with self._working:
            if self._link is not None:
                await self._link.close()

    async def step(self) -> int:
        """Publish one batch; return how many rows it had. Raises what NATS and Postgres fail with."""
        link = await self._connected()
        async with self._pool.acquire() as connection, connection.transaction():
            claims = await self.source.claim_aggregates(connection, self._after, self._settings.aggregates)
            more = len(claims) == self._settings.aggregates
            self._after = claims[-1][0] if more else self.source.lowest  # round and round, so that none is left out
            mine = [aggregate for aggregate, claimed in claims if claimed]
            if not mine:
                return more
            batch = await self.source.claim(
                connection, mine, most=self._settings.batch, most_bytes=self._settings.batch_bytes
            )
            placed, failed = await self._publish(link, batch)
            unsure = await self.source.mark_published(connection, placed, self._horizon)
            await self.source.requeue_unhandled(connection, await _swallowed(link, placed))
            await self.source.mark_failed(
                connection, [(message, error, self._wait(message)) for message, error in failed]
            )
        if unsure:
            self._looked = 0.0  # the stream is not the one that it was
            _log.warning("numbers_given_twice", source=self.source.name, messages=len(unsure))
        self._count(placed, failed)
        return len(placed) + len(failed)

    async def _publish(self, link: Link, batch: Sequence[Outgoing]) -> tuple[list[tuple[Outgoing, Place]], _Failures]:
        if not link.streams.missing and any(link.streams.of(message.subject) is None for message in batch):
            await link.streams.refresh(link.js)  # it may have come since: nobody is to declare what is there
        ready, refused = _split([_fitting(message, link.refusal) for message in batch], link.refusal)
        placed: list[tuple[Outgoing, Place]] = []
        failed: _Failures = refused
        for message, result in zip(ready, await link.publish(ready), strict=True):
            if isinstance(result, Place):
                placed.append((message, result))
            else:
                failed.append((message, result))
        if failed:
            self._looked = 0.0  # a stream may have come or gone
        return placed, failed

    async def _connected(self) -> Link:
        """Return a connection that stands, with a picture of the streams that is not old."""
        now = asyncio.get_running_loop().time()
        if self._link is None or self._link.broken:
            self._link = None
            name = f"postroom-worker {self.source.name}"
            link = await Link.open(self._nats, name=name, ack_seconds=self._settings.ack_seconds)
            try:
                await self._opened(link)
            except BaseException:
                await link.close()
                raise
            self._link, self._looked = link, now
        elif now - self._looked > _REFRESH_SECONDS:
            await self._link.streams.refresh(self._link.js)
            self._looked = now
        return self._link

    def _wait(self, message: Outgoing) -> float:
        backoff = Backoff(self._settings.first_seconds, self._settings.most_seconds)
        return backoff.seconds(message.attempts + 1, self._rng.random)

    def _count(self, placed: Sequence[object], failed: _Failures) -> None:
        self.counters.batches += 1
        self.counters.published += len(placed)
        self.counters.failed += len(failed)
        for message, error in failed[:1]:
            _log.warning(
                "publish_failed", source=self.source.name, key=message.key, subject=message.subject, error=error,
                messages=len(failed),
            )  # fmt: skip

    def _troubled(self, error: str) -> None:
        if error != self.counters.trouble:  # an outage repeats one error at every try
            _log.warning("publishing_failed", source=self.source.name, error=error)
        self.counters.trouble = error

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)


async def _swallowed(link: Link, placed: Sequence[tuple[Outgoing, Place]]) -> list[str]:
    """Return the messages that a stream knows from an earlier publish, and no longer has: it took nothing now.

    They were taken out before anybody noted them as published, or acknowledged, which only the record may know.
    """
    known = [(message.key, place) for message, place in placed if place.duplicate]
    holes = {name: await read_holes(link.js, name) for name in {place.stream for _, place in known}}
    return [key for key, place in known if not holes[place.stream].holds(place.sequence)]


def _fitting(message: Outgoing, refusal: Callable[[Outgoing], str | None]) -> Outgoing:
    """Return the message, or its shorter form where that is all that may be sent of it."""
    if message.shorter is None or refusal(message) is None:
        return message
    return message._replace(body=message.shorter)


def _split(batch: Sequence[Outgoing], refusal: Callable[[Outgoing], str | None]) -> tuple[list[Outgoing], _Failures]:
    """Return what may be sent, and the first of each aggregate that can't be; nothing behind a gap is in either."""
    next_place: dict[str | int, int] = {}
    ready, refused = [], []
    for message in batch:
        if message.place != next_place.get(message.aggregate, 1):
            continue
        if (error := refusal(message)) is None:
            next_place[message.aggregate] = message.place + 1
            ready.append(message)
        else:
            next_place[message.aggregate] = 0  # no place: all that follows waits
            refused.append((message, error))
    return ready, refused
