"""The publisher: moves a source's rows into JetStream (docs/contract/delivery.md#delivery-16).

One claim holds a batch, which is published, and settled by what the server has acknowledged:

    claim    some aggregates, then their oldest rows (in Postgres one transaction until the end)
    publish  pipelined on one connection or in one atomic batch, each message under its own id (`Nats-Msg-Id`)
    settle   published, and the place in the stream; or the attempt, the error and the time of the next one

Where a publisher is killed before the publish, nothing has happened. After it, the rows are still unpublished, and the
next publisher sends them again under the same ids, which the stream drops within its duplicate window, and every inbox
after that. A message that the stream drops but no longer has is published once more, under the next epoch.

The order of an aggregate is kept, however many publishers there are:

- Its advisory lock is held from before its rows are read until their marks are committed, and the rows are read by a
  second statement, which sees all that the lock's last holder has committed.
- Only an unbroken beginning of its unpublished rows is sent. Behind a row that is not due yet, is held by another
  publisher, or cannot be published at all, its other rows wait; other aggregates do not.
- Of a batch that breaks off, a beginning is in the stream (see `Link`); the rest is sent again, in order.

One case remains: a server that refuses one message for lack of space and then accepts a later one of the same batch.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import asyncpg
import structlog

from postroom._wire import spans
from postroom._wire.retry import Backoff
from postroom.chassis.postgres import POSTGRES_ERRORS, Pool, why_waiting
from postroom.chassis.runtime import in_step, within
from postroom.delivery.message import MESSAGE_ID
from postroom.delivery.publication import Claim, Denied, Failed, Outgoing, Place, Refused, Source, Unanswered
from postroom.delivery.publication.link import Link, read_holes
from postroom.delivery.settings import NatsSettings, PublisherSettings
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

_MANY: Final = 100  # rows: a batch that large has a backlog behind it, and no pause after it
_TROUBLE_SECONDS: Final = 0.5  # between two tries to reach NATS or Postgres
_REFRESH_SECONDS: Final = 30.0  # how old the picture of the streams may be: a refresh makes the server list them all
CHANNEL: Final = "postroom_outbox"  # of the bell
_PAUSES: Final = Backoff(0.5, 30.0)  # between two tries to listen
_LEAST_REST_SECONDS: Final = 0.05  # after a batch, unless the publisher is woken: a look costs three round trips

Placed = list[tuple[Outgoing, Place]]


@dataclass
class PublisherCounters:
    """What a publisher has done since it started."""

    published: int = 0
    failed: int = 0
    batches: int = 0
    trouble: str | None = "it has not started"  # why nothing is published, as a sentence


class Pace:
    """The rests between looks without a ring of the bell: as long as the quiet time before, up to `most` seconds."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._busy_at = float("-inf")

    def rest(self, now: float, *, moved: bool) -> float:
        """Return the seconds until the next look; `moved` says whether this one, at `now`, found anything."""
        if moved:
            self._busy_at = now
        return min(max(_LEAST_REST_SECONDS, now - self._busy_at), self._most)


class Publisher:
    """Publishes one source; any number may run, in one process or many."""

    def __init__(
        self,
        source: Source,
        settings: PublisherSettings,
        nats: NatsSettings,
        *,
        name: str,
        opened: Callable[[Link], Awaitable[object]],
        rng: Random,
        apart: float = 0.0,
    ) -> None:
        """Call `opened` with each new connection, whose name is `name`, before anything is published on it.

        Rows that come within `apart` seconds after a batch has begun wait, and are published together.
        """
        self.source = source
        self.counters = PublisherCounters()
        self._settings = settings
        self._nats = nats
        self._name = name
        self._opened = opened
        self._rng = rng
        self._apart = apart
        self._link: Link | None = None
        self._looked = 0.0
        # What failed for JetStream's silence, or for what NATS denies, and until when that is not tried again.
        self._silence, self._denial = ("", 0.0), ("", 0.0)
        self._connecting = asyncio.Lock()
        self._working = asyncio.Lock()
        self._stop = asyncio.Event()
        self._woken = asyncio.Event()

    async def run(self) -> None:
        """Publish until `stop`; outages of NATS or Postgres are waited out."""
        clock, pace = asyncio.get_running_loop().time, Pace(self._settings.idle_seconds)
        while not self._stop.is_set():
            began, called = clock(), self._woken.is_set()
            self._woken.clear()  # a wake from here on is for rows that this look may not see
            pausing = self._woken
            try:
                async with self._working:
                    moved = await self.step()
                # The rows that it was woken for may be held up by an event without a ring, such as an accept that
                # fails.
                pause = pace.rest(clock(), moved=moved > 0 or called)
                self.counters.trouble = self.silence
            except (PostroomError, *POSTGRES_ERRORS) as failure:
                error = why_waiting(failure)
                if error != self.counters.trouble:  # an outage repeats one error at every try
                    _log.warning("publishing_failed", source=self.source.name, error=error)
                self.counters.trouble = error
                pause, moved, pausing = _TROUBLE_SECONDS, 0, self._stop  # waking it would not help
            if moved < _MANY:
                await within(in_step(pause), pausing)
                if moved and (early := began + self._apart - clock()) > 0:
                    await within(early, self._stop)

    def wake(self) -> None:
        """Have it look now: rows were committed. Those that come during a batch go together into the next one."""
        self._woken.set()

    async def stop(self) -> None:
        """Finish the batch in hand and close the connection; harmless a second time."""
        self._stop.set()
        self._woken.set()
        async with self._working:
            if self._link is not None:
                await self._link.close()

    async def step(self) -> int:
        """Publish what one claim holds; return how many rows that were. Raises what NATS and the source fail with."""
        await self.connected()  # before any row is taken in hand
        async with self.source.claim(self._settings) as claim:
            if not claim.messages:
                return claim.more
            placed, failed = await self.publish(claim)
        return len(placed) + len(failed)

    async def publish(self, claim: Claim) -> tuple[Placed, list[Failed]]:
        """Publish the messages of a claim and settle it; what waits behind one that failed is in neither list.

        Raises `PostroomError` where JetStream cannot be reached.
        """
        link = await self.connected()
        if not link.streams.missing and any(link.streams.of(message.subject) is None for message in claim.messages):
            await link.streams.refresh(link.js)  # the stream may be new: else an operator is asked to declare it
        ready, refused = _split(claim.messages, link.refusal)
        began = time.time_ns()
        placed: Placed = []
        for message, result in zip(ready, await link.publish(ready), strict=True):
            if isinstance(result, Place):
                placed.append((message, result))
            else:
                refused.append((message, result))
        backoff = Backoff(self._settings.first_seconds, self._settings.most_seconds)
        failed = [
            Failed(message, error, backoff.seconds(message.attempts + 1, self._rng.random))
            for message, error in refused
        ]
        if spans.wanted():
            for message, error in [*((message, None) for message, _ in placed), *refused]:
                headers = message.headers
                spans.record(
                    spans.PUBLISH,
                    message.subject,
                    headers.get(MESSAGE_ID),
                    headers.get("traceparent"),
                    began=began,
                    error=None if error is None else ("not_published", error),
                )
        shared = await claim.settle(placed, await _gone(link, placed), failed)
        if shared:
            _log.warning("numbers_given_twice", source=self.source.name)
        if shared or failed:
            self._looked = 0.0  # a stream may have been created, deleted or created again
        self._count(placed, failed)
        return placed, failed

    @property
    def silence(self) -> str | None:
        """Why JetStream took nothing of the last batch, or NATS denies some subjects, until that is over."""
        now = asyncio.get_running_loop().time()
        return next((why for why, until in (self._denial, self._silence) if now < until), None)

    def _count(self, placed: Placed, failed: list[Failed]) -> None:
        self.counters.batches += 1
        self.counters.published += len(placed)
        self.counters.failed += len(failed)
        if placed:
            self._silence = "", 0.0
        if failed:
            message, error, _ = failed[0]
            last = failed[-1].error  # JetStream's own answer, if it was sent anything
            wait = max(each.seconds for each in failed) + 2 * self._settings.ack_seconds
            until = asyncio.get_running_loop().time() + wait
            if (denied := next((each.error for each in failed if isinstance(each.error, Denied)), None)) is not None:
                self._denial = denied, until
            elif not placed and isinstance(last, Unanswered):
                self._silence = f"{last}; see the log of NATS", until
            elif not placed and isinstance(last, Refused):
                self._silence = last, until
            _log.warning(
                "publish_failed", source=self.source.name, key=message.key, subject=message.subject, error=error,
                messages=len(failed),
            )  # fmt: skip

    async def connected(self) -> Link:
        """Return an open connection with a recent picture of the streams; raises `PostroomError`."""
        async with self._connecting:
            now = asyncio.get_running_loop().time()
            if self._link is None or self._link.broken:
                self._link = None
                link = await Link.open(self._nats, name=self._name, ack_seconds=self._settings.ack_seconds)
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


async def _gone(link: Link, placed: Placed) -> list[Outgoing]:
    """Return the messages that a stream dropped as duplicates, and no longer has.

    They were deleted before they were marked as published, or acknowledged; only the record knows which.
    """
    known = [(message, place) for message, place in placed if place.duplicate]
    holes = {name: await read_holes(link.js, name) for name in {place.stream for _, place in known}}
    return [message for message, place in known if not holes[place.stream].holds(place.sequence)]


def _split(
    batch: Sequence[Outgoing], refusal: Callable[[Outgoing], str | None]
) -> tuple[list[Outgoing], list[tuple[Outgoing, str]]]:
    """Return what may be sent, and the first of each aggregate that can't be; nothing behind a gap is in either.

    Where only the shorter form of a message may be sent, it is in the list in that form.
    """
    next_place: dict[str | int, int] = {}
    ready, refused = [], []
    for message in batch:
        if message.place != next_place.get(message.aggregate, 1):
            continue
        fitting, error = message, refusal(message)
        if error is not None and message.shorter is not None:
            fitting = message._replace(body=message.shorter)
            error = refusal(fitting)
        if error is None:
            next_place[message.aggregate] = message.place + 1
            ready.append(fitting)
        else:
            next_place[message.aggregate] = 0  # no place: all that follows waits
            refused.append((fitting, error))
    return ready, refused


class Bell:
    """Wakes the publishers of one process as soon as there is something to publish.

    A program that has committed rows rings it by `NOTIFY` (docs/contract/delivery.md#delivery-86), with the name of the
    source, such as `events`, or without one for all. It is rung after the commit, by a statement of its own: a
    transaction that notifies holds a lock of the whole database until it ends, so that commits with rows in them would
    queue. Nothing is lost with a ring that is not heard: publishers look by themselves too, only later.
    """

    def __init__(self, pool: Pool, publishers: Sequence[Publisher]) -> None:
        """Use one connection of `pool` while it runs."""
        self._pool = pool
        self._publishers = publishers

    def ring(self, source: str = "") -> None:
        """Wake the publisher of a source in this process, or all."""
        for publisher in self._publishers:
            if source in ("", publisher.source.name):
                publisher.wake()

    async def run(self) -> None:
        """Listen until cancelled; a connection that breaks is replaced, and all publishers are woken then."""
        failures = 0

        def heard(_connection: Any, _pid: int, _channel: str, source: object) -> None:
            self.ring(str(source))

        while True:
            lost = asyncio.Event()
            try:
                async with self._pool.acquire() as connection:
                    connection.add_termination_listener(ended := lambda _: lost.set())  # noqa: B023 - this turn's
                    await connection.add_listener(CHANNEL, heard)
                    try:
                        failures = 0
                        self.ring()
                        await lost.wait()
                        _log.info("bell_not_heard", error="Postgres ended the connection")
                    finally:
                        with suppress(asyncpg.InterfaceError):  # it has ended, and its listeners with it
                            connection.remove_termination_listener(ended)
                            await connection.remove_listener(CHANNEL, heard)
            except POSTGRES_ERRORS as error:
                _log.info("bell_not_heard", error=why_waiting(error))
            failures += 1
            await asyncio.sleep(_PAUSES.seconds(failures))
