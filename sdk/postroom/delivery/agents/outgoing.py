"""What one agent sends: the SQLite form of a source, and publishing what was stored a moment ago.

What the agent emitted, what the runtime reported and the agent's dead letters are rows of one kind in its event store.
They go out as soon as they are committed (`publish`); what no process has in hand any more waits for the next claim.

What a work queue no longer has counts as handled, and stays so when the queue is lost as a whole. So a comparison does
not publish what was purged from one; `postroom agent republish` does that by hand.

Where a message went is kept for `keep_days`, which is at least the horizon, so that a comparison can publish again all
that is within it; republishing by hand reaches as far back. Its event stays in the store for ever.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import msgspec
import structlog
from nats.js import JetStreamContext

from postroom._wire.dead_letters import DeadLetter
from postroom._wire.retry import STEADY, Backoff
from postroom.agent import EPOCH
from postroom.delivery.agents.decisions import Draft
from postroom.delivery.agents.envelopes import headers_of, to_microseconds
from postroom.delivery.agents.store import Mark, Owner, Store, Stored, decode_record, durably, payload_of
from postroom.delivery.agents.turns import Turns
from postroom.delivery.dead_letters import LETTER, letter_id
from postroom.delivery.nats import end_if_cancelled, most_payload
from postroom.delivery.publication import Failed, Outgoing, Place, Placed, Search, identifying
from postroom.delivery.publication.link import MOST_HOLES, Link, read_holes
from postroom.delivery.publication.publisher import Publisher
from postroom.delivery.publication.record import Record
from postroom.delivery.settings import AgentSettings, NatsSettings, PublisherSettings, RecordSettings
from postroom.delivery.subjects import dead_letter_subject
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

_PAGE: Final = 1000  # rows that are forgotten in one turn
_BEFORE_ALL: Final = -(2**63)  # no position is lower; those of dead letters are negative
_MILLISECOND: Final = timedelta(milliseconds=1)
_LATEST: Final = datetime.max.replace(tzinfo=UTC)

Clock: TypeAlias = Callable[[], int]  # ms since the epoch


@dataclass(slots=True)
class AgentCounters:
    """For metrics; each counts messages."""

    handled: int = 0
    found: int = 0  # delivered again after they were stored
    conflicts: int = 0
    refused: int = 0
    failed: int = 0  # `receive` or `apply` raised, or the message could not be read
    emitted: int = 0
    published: int = 0
    lost: int = 0  # by JetStream: they are published again


class Key(NamedTuple):
    """What the store knows a message by."""

    position: int
    epoch: int  # how often a stream has lost it
    cause: int  # the position of the message that caused it


def emitted(position: int, cause: int, draft: Draft) -> Outgoing:
    """Return the message of an event that was just stored."""
    key = Key(position, 0, cause)
    return Outgoing(key, position, 1, 0, draft.subject, draft.payload, headers_of(draft.envelope))


def stored(row: Stored) -> Outgoing:
    """Return the same message, or a dead letter, read back from the store; what was lost has a fresh message id."""
    position, epoch, text, subject = row
    if subject is not None:
        letter = msgspec.json.decode(text, type=DeadLetter)
        headers = identifying(letter_id(letter), epoch) | LETTER
        shorter = msgspec.json.encode(letter.shortened())
        return Outgoing(Key(position, epoch, position), position, 1, 0, subject, text, headers, shorter)
    record = decode_record(text)
    key = Key(position, epoch, record.cause or 0)
    return Outgoing(key, position, 1, 0, record.subject, payload_of(text), headers_of(record.envelope, epoch))


class StoreClaim:
    """Messages of the store that are being published; other processes may publish them too, under the same ids."""

    more = False

    def __init__(self, source: StoreSource, messages: Sequence[Outgoing]) -> None:
        self.messages = messages
        self._source = source

    async def settle(
        self, placed: Sequence[tuple[Outgoing, Place]], gone: Sequence[Outgoing], failed: Sequence[Failed]
    ) -> bool:
        """Mark what JetStream has; the caller tries what it has not again."""
        del failed
        return bool(placed) and await self._source.mark(placed, gone)


class StoreSource:
    """The rows of one event store, as publisher and record see them."""

    name = "messages"

    def __init__(
        self, store: Store, turns: Turns, settings: RecordSettings, counters: AgentCounters, clock: Clock
    ) -> None:
        self._store = store
        self._turns = turns
        self._keep = timedelta(days=settings.keep_days)
        self._counters = counters
        self._clock = clock
        self._after = _BEFORE_ALL
        self._forgetful: frozenset[str] = frozenset()

    @asynccontextmanager
    async def claim(self, limits: PublisherSettings) -> AsyncIterator[StoreClaim]:
        """Claim a page of what was lost, and of letters that never were published; an empty page is the end."""
        async with self._turns.turn():
            page = await self._store.lost(self._after, limits.batch)
        self._after = page[-1].position if page else _BEFORE_ALL
        yield StoreClaim(self, [stored(row) for row in page])

    async def mark(self, placed: Sequence[tuple[Outgoing, Place]], gone: Sequence[Outgoing]) -> bool:
        """Note where messages are; what is `gone` from a stream that keeps what is done is unpublished again.

        Return whether any of them shared a number with another.
        """
        now = self._clock()
        marks = [
            Mark(key.position, key.epoch, now, place.stream, to_microseconds(place.created_at), place.sequence)
            for (key, *_), place in placed
        ]
        streams = {message.key: place.stream for message, place in placed}
        lost = [message.key.position for message in gone if streams[message.key] not in self._forgetful]
        async with self._turns.turn():
            shared = await durably(partial(self._store.mark_published, marks))
            self._counters.lost += shared + (await durably(partial(self._store.requeue, lost)) if lost else 0)
        self._counters.published += len(marks)
        return bool(shared)

    async def now(self) -> datetime:
        """Return the time."""
        return EPOCH + self._clock() * _MILLISECOND

    async def all_marked(self) -> bool:
        """Return False: what other processes are publishing is not known."""
        return False

    async def requeue_lost(self, search: Search) -> int:
        """Make unpublished what a stream has lost; what went by age loses its place, so that it is looked at once."""
        async with self._turns.turn():
            lost = await durably(partial(self._store.requeue_lost, search))
        self._counters.lost += lost
        return lost

    async def newest_at(
        self, stream: str, created_at: datetime, first: int, last: int, missing: Sequence[int]
    ) -> Placed | None:
        """Return the message with the highest number of a stream in a range."""
        return await self._store.newest_at(stream, to_microseconds(created_at), first, last, missing)

    async def note_handled(self, link: Link) -> None:
        """Forget the places of messages that left a stream that forgets what is done: they are not lost with it."""
        queues = [stream for stream in link.streams.pictures if stream.forgets]
        self._forgetful = frozenset(stream.name for stream in queues)
        now = await self.now()
        for stream in queues:
            place = stream.name, to_microseconds(stream.created_at)
            beginning = stream.name, stream.created_at, stream.first_sequence
            handled = Search("before_the_beginning", *beginning, _LATEST, now)  # whenever it was published
            async with self._turns.turn():
                await durably(partial(self._store.requeue_lost, handled))
            if 0 < stream.holes <= MOST_HOLES and await self._store.has_place(*place):
                holes = await read_holes(link.js, stream.name)
                if holes.created_at == stream.created_at:
                    async with self._turns.turn():
                        await durably(partial(self._store.forget_places, *place, sorted(holes.numbers)))

    async def prune(self) -> None:
        """Forget what was published before `keep_days`; one page a turn, so that other turns come in between."""
        before = self._clock() - self._keep // _MILLISECOND
        pruned = _PAGE
        while pruned == _PAGE:
            async with self._turns.turn():
                pruned = await durably(partial(self._store.prune, before, _PAGE))


class AgentPublisher:
    """Publishes for one agent, keeps its record, and its dead letters; `run` it as a task."""

    def __init__(
        self,
        store: Store,
        turns: Turns,
        owner: Owner,
        counters: AgentCounters,
        clock: Clock,
        *,
        nats: NatsSettings,
        settings: AgentSettings,
        most_bytes: int,
    ) -> None:
        """`most_bytes` is the largest payload that JetStream accepts."""
        kept = RecordSettings(horizon_days=settings.horizon_days, keep_days=settings.keep_days)
        self._source = StoreSource(store, turns, kept, counters, clock)
        self.most_bytes = most_bytes
        self.record = Record([self._source], kept)
        self.publisher = Publisher(
            self._source,
            PublisherSettings(ack_seconds=settings.publish_seconds),
            nats,
            name=f"postroom-agent {owner.agent} publisher",
            opened=self._compare,
            rng=random.Random(),  # noqa: S311 - it spreads retries, no secret depends on it
        )
        self._store = store
        self._turns = turns
        self._check_seconds = settings.check_seconds
        self._retries = Backoff(settings.retry_seconds, settings.retry_seconds, least=STEADY)
        self._context = owner.tenant

    @property
    def trouble(self) -> str | None:
        """Return why JetStream has nothing of what was published last."""
        return self.publisher.silence

    async def run(self) -> None:
        """Compare the streams with the store every `check_seconds`, and publish what they lost, until cancelled."""
        while True:
            try:
                link = await self.publisher.connected()
                end_if_cancelled()
                await self._compare(link)
                while await self.publisher.step():
                    pass
            except PostroomError as error:
                _log.warning("agent_streams_unknown", detail=str(error))
            await self.record.prune()
            end_if_cancelled()
            await asyncio.sleep(self._check_seconds)

    async def close(self) -> None:
        """Close the connection."""
        await self.publisher.stop()

    async def rounds(self, messages: Sequence[Outgoing]) -> AsyncIterator[set[int]]:
        """Publish until JetStream has everything; after each round yield the causes of what it does not have."""
        while True:
            messages = await self._publish(messages)
            yield {message.key.cause for message in messages}
            if not messages:
                return
            end_if_cancelled()
            await asyncio.sleep(self._retries.seconds(1))

    async def keep(self, letter: DeadLetter) -> None:
        """Commit a dead letter and publish it; where JetStream does not accept it now, a later claim publishes it."""
        subject = dead_letter_subject(self._context, letter.original_subject)
        record = msgspec.json.encode(letter)
        async with self._turns.turn():
            kept = await durably(partial(self._store.keep_letter, letter_id(letter), subject, record))
        if kept is not None:
            await self._publish([stored(kept)])

    async def _publish(self, messages: Sequence[Outgoing]) -> Sequence[Outgoing]:
        """Publish all at once, mark what JetStream acknowledged in time, and return the others."""
        if not messages:
            return messages
        try:
            placed, _ = await self.publisher.publish(StoreClaim(self._source, messages))
        except PostroomError as error:
            _log.warning("agent_publish_failed", messages=len(messages), detail=str(error))
            return messages
        there = {message.key for message, _ in placed}
        return [message for message in messages if message.key not in there]

    async def _compare(self, link: Link) -> None:
        await self.record.compare(link)
        await self._source.note_handled(link)


def into_jetstream(js: JetStreamContext, nats: NatsSettings, settings: AgentSettings) -> partial[AgentPublisher]:
    """Return what makes the publisher of an agent's store."""
    return partial(AgentPublisher, nats=nats, settings=settings, most_bytes=most_payload(js))
