"""The record of an agent: what JetStream lost of its messages is published again from its store.

Postgres is the record of what was sent (`delivery.publishing.record`); of what an agent emitted its event store is. A
published message says where it went: the stream, when that was created, and its number. Comparing shows what is gone:

    the stream was created at another time      everything that went into the other one
    its last number is smaller                  the newest: the server lost power
    another message has the number              the same, where others have published since
    its first number is larger                  it was purged; only where nothing but age takes messages out of it
    it gives a number away a second time        one of the two (found when the second is marked)

What is gone and within the horizon is unpublished again, under the next epoch and so under a fresh message id
(`<id>/<epoch>`): within its duplicate window the stream would swallow the old one. Receivers know it by the id without
the epoch. What is gone by age or handled loses its place, so that each message is looked at once.

What is missing in the middle of a work queue was handled, and stays so when the queue is lost as a whole.

On each new connection the comparison comes first, before anything is published, and then every `check_seconds`. It
cannot see what was purged from a work queue, and single messages deleted from the middle of a stream: `postroom agent
republish` publishes those by hand.

Where a message went is known for `keep_days`, which is not below the horizon, so that all that could be published again
by a comparison can be; republishing by hand reaches as far back. Its event stays in the store for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Final

import structlog

from postroom.delivery.agents.counters import AgentCounters
from postroom.delivery.agents.envelopes import to_microseconds
from postroom.delivery.agents.publishing import Publisher
from postroom.delivery.agents.settings import AgentSettings
from postroom.delivery.agents.store import Search, Store, durably
from postroom.delivery.agents.turns import Turns
from postroom.delivery.nats import end_if_cancelled
from postroom.delivery.publishing.displaced import Noted, first_displaced
from postroom.delivery.publishing.queue_state import MOST_HOLES
from postroom.delivery.publishing.source import message_id
from postroom.delivery.publishing.streams import StreamPicture
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

_MILLISECOND: Final = timedelta(milliseconds=1)
_PAGE: Final = 1000  # messages published again at once
_BEFORE_ALL: Final = -(2**63)  # no position is lower; those of dead letters are negative


class Record:
    """Compares the streams with what one agent published; `run` it as a task."""

    def __init__(
        self,
        publisher: Publisher,
        store: Store,
        turns: Turns,
        settings: AgentSettings,
        *,
        counters: AgentCounters,
        clock: Callable[[], int],
    ) -> None:
        """`clock` gives ms since the epoch."""
        self.comparisons = 0  # since the start
        self._publisher = publisher
        publisher.connected = self.compare
        self._store = store
        self._turns = turns
        self._seconds = settings.check_seconds
        self._horizon = timedelta(days=settings.horizon_days)
        self._kept = timedelta(days=settings.keep_days)
        self._counters = counters
        self._clock = clock

    async def run(self) -> None:
        """Compare again and again, until cancelled; without NATS there is nothing to compare with."""
        while True:
            try:
                await self.compare()
            except PostroomError as error:
                _log.warning("agent_streams_unknown", detail=str(error))
            else:
                await self._republish()
            await self._prune()
            end_if_cancelled()
            await asyncio.sleep(self._seconds)

    async def compare(self) -> int:
        """Make unpublished what the streams have lost; return how many messages that were. Raises `PostroomError`.

        The time is taken before the streams are looked at: what was published by then, they must have.
        """
        until = self._clock()
        lost = 0
        for stream in await self._publisher.look():
            for search in self._searches(stream, until):
                lost += await self._requeue(search)
            if stream.work_queue:
                await self._forget_done(stream)
            elif stream.keeps_all:
                lost += await self._requeue_displaced(stream, until)
        self._counters.lost += lost
        self.comparisons += 1
        return lost

    def _searches(self, stream: StreamPicture, until: int) -> Iterator[Search]:
        place = stream.name, to_microseconds(stream.created_at)
        first, last = stream.first_sequence, stream.last_sequence
        since = until - self._horizon // _MILLISECOND
        yield Search("of_another_stream", *place, 0, since, until)
        yield Search("behind_the_end", *place, last, since, until)
        if stream.work_queue:  # what is not there was handled
            yield Search("before_the_beginning", *place, first, until, until)
        elif stream.keeps_all:
            since = until - stream.reach(self._horizon) // _MILLISECOND
            yield Search("before_the_beginning", *place, first, since, until)

    async def _forget_done(self, stream: StreamPicture) -> None:
        """Forget where what is no longer in a work queue was: it was handled, and is not lost with the queue."""
        place = stream.name, to_microseconds(stream.created_at)
        if 0 < stream.holes <= MOST_HOLES and await self._store.has_place(*place):
            holes = await self._publisher.read_holes(stream.name)
            if holes.created_at == stream.created_at:
                async with self._turns.turn():
                    await durably(partial(self._store.forget_places, *place, sorted(holes.numbers)))

    async def _requeue_displaced(self, stream: StreamPicture, until: int) -> int:
        """Requeue the newest that a server has lost, where others have filled their places before this comparison."""
        displaced = await first_displaced(stream, partial(self._newest_at, stream))
        if displaced is None:
            return 0
        since = until - self._horizon // _MILLISECOND
        created = to_microseconds(stream.created_at)
        return await self._requeue(Search("behind_the_end", stream.name, created, displaced - 1, since, until))

    async def _newest_at(self, stream: StreamPicture, sequence: int) -> Noted | None:
        entry = await self._store.newest_at(stream.name, to_microseconds(stream.created_at), sequence)
        if entry is None:
            return None
        found = await self._publisher.message_id_at(stream.name, entry.sequence)
        return Noted(entry.sequence, found == message_id(entry.message_id, entry.epoch))

    async def _requeue(self, search: Search) -> int:
        async with self._turns.turn():
            lost = await durably(partial(self._store.requeue_lost, search))
        if lost:
            _log.warning("agent_messages_lost", stream=search.stream, loss=search.loss, messages=lost)
        return lost

    async def _republish(self) -> None:
        """Publish what was lost; what JetStream does not take now is tried again after the next comparison."""
        after = _BEFORE_ALL
        while True:
            async with self._turns.turn():
                page = await self._store.lost(after, _PAGE)
            if not page:
                return
            await self._publisher.publish(self._publisher.read(page))
            after = page[-1].position

    async def _prune(self) -> None:
        """Forget what was published so long ago that nothing asks about it; a page at a time, others have turns too."""
        before = self._clock() - self._kept // _MILLISECOND
        pruned = _PAGE
        while pruned == _PAGE:
            async with self._turns.turn():
                pruned = await durably(partial(self._store.prune, before, _PAGE))
