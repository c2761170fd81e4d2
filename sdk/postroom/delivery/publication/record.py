"""The record: what JetStream has lost is published again (docs/contract/delivery.md#delivery-21).

A server that loses power may lose the newest messages of a stream, or the whole stream; an operator may purge or delete
one. The row of a published message keeps its stream (the name, and when that stream was created) and its number there,
so that comparing with the stream shows what is lost:

    the stream was created at another time      everything that went into the other one
    its last number is smaller than a row's     the newest
    another message has a row's number          the same, where others have published since
    its first number is larger than a row's     it was purged; only where nothing but age removes messages from it
    it gives out a number a second time         one of the two (the publisher sees that when it settles a claim)

What is lost, is younger than the horizon, and was not settled (which each form of a source knows in its own way)
becomes unpublished again, under the next epoch. The publisher does the rest. Where a comparison wrongly takes a message
for lost, the message is in the stream twice, which is harmless: inboxes know it by its id, without the epoch.

What a comparison cannot see: messages removed from a stream that forgets them when they are done, too (a work queue, or
one of interest), and single messages deleted from the middle of another stream. `WorkQueues` sees the first, as far as
they came from Postgres; an operator has the rest published again by hand.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from typing import Final, NamedTuple

import structlog
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom.chassis.clock import now
from postroom.chassis.postgres import Pool
from postroom.delivery.errors import NATS_ERRORS, mapped
from postroom.delivery.message import MESSAGE_ID
from postroom.delivery.publication import Placed, Search, Source, message_id
from postroom.delivery.publication.link import (
    ADVISORIES,
    Audit,
    Floors,
    Holes,
    Link,
    StreamPicture,
    read_floors,
    read_holes,
)
from postroom.delivery.publication.postgres import EVENTS, QUERIES, PostgresSource, all_marked
from postroom.delivery.settings import RecordSettings
from postroom.delivery.streams import all_consumers, filters_of
from postroom.delivery.subjects import expression_of

_log = structlog.get_logger(__name__)

_ADVISORY_SECONDS: Final = 1.0  # longest time between a purge and its advisory, many times what a server needs


class Record:
    """Compares streams with what was published into them; one for all publishers of a process."""

    def __init__(self, sources: Sequence[Source], settings: RecordSettings) -> None:
        self.comparisons = 0  # since the start
        self.complete = False  # whether the last one found all that was lost before it
        self.requeued = dict.fromkeys((source.name for source in sources), 0)
        self.horizon = settings.horizon
        self._sources = sources
        self._compared: dict[str, StreamPicture] = {}
        self._link: Link | None = None  # of the last comparison

    async def compare(self, link: Link) -> int:
        """Make unpublished what the streams have lost; return how many messages that were. Raises `PostroomError`.

        The time is taken before the streams are read: what was published by then, they must have. What a stream lost
        with its beginning, or as a whole, may be marked as published only after they were read. So that is waited for,
        and counts where the streams are the same afterwards: one that was created again meanwhile has what was marked
        since.
        """
        untils = [await source.now() for source in self._sources]
        await link.streams.refresh(link.js)
        pictures = link.streams.pictures
        seen = {(stream.name, stream.created_at) for stream in pictures}
        changed = any(self._recreated(stream) or self._shortened(stream) for stream in pictures)
        requeued, all_complete = 0, True
        for source, until in zip(self._sources, untils, strict=True):
            marked, complete = until, not changed
            if changed and await source.all_marked():
                moment = await source.now()
                await link.streams.refresh(link.js)
                complete = {(stream.name, stream.created_at) for stream in link.streams.pictures} >= seen
                marked = moment if complete else until
            all_complete = all_complete and complete
            for stream in pictures:
                for search in self._searches(stream, until, marked):
                    requeued += await self._requeue(source, search)
                if link is not self._link or not stream.forgets:  # which may have more holes than messages
                    # the newest messages that the server has lost, where others have got their numbers by now
                    first = await _first_displaced(link.js, source, stream)
                    if first is not None:
                        place = stream.name, stream.created_at, first - 1
                        requeued += await self._requeue(
                            source, Search("behind_the_end", *place, until - self.horizon, until)
                        )
        self.complete = all_complete
        if all_complete:
            self._compared.update({stream.name: stream for stream in pictures})
        self._link = link
        self.comparisons += 1
        return requeued

    async def prune(self) -> None:
        """Forget what was published so long ago that it is not needed any more."""
        for source in self._sources:
            await source.prune()

    async def _requeue(self, source: Source, search: Search) -> int:
        found = await source.requeue_lost(search)
        if found:
            _log.warning(f"stream_{search.loss}", source=source.name, stream=search.stream, requeued=found)
        self.requeued[source.name] += found
        return found

    def _searches(self, stream: StreamPicture, until: datetime, marked: datetime) -> list[Search]:
        place, since = (stream.name, stream.created_at), until - self.horizon
        searches = [Search("behind_the_end", *place, stream.last_sequence, since, until)]
        if self._recreated(stream):
            searches.append(Search("of_another_stream", *place, 0, since, marked))
        if self._shortened(stream):
            since = until - stream.reach(self.horizon)
            searches.append(Search("before_the_beginning", *place, stream.first_sequence, since, marked))
        return searches

    def _recreated(self, stream: StreamPicture) -> bool:
        before = self._compared.get(stream.name)
        return before is None or before.created_at != stream.created_at

    def _shortened(self, stream: StreamPicture) -> bool:
        """Return whether a stream begins at another number than before, and not because it was full."""
        before = self._compared.get(stream.name)
        begins_elsewhere = before is None or before.first_sequence != stream.first_sequence
        return begins_elsewhere and stream.keeps_all and not stream.forgets


async def _first_displaced(js: JetStreamContext, source: Source, stream: StreamPicture) -> int | None:
    """Return the first noted number that is another message's now; None where there is none.

    A loss takes the newest messages of a stream. So up to some number all noted messages are there, and after it none:
    a bisection finds that number with few requests, and with one where nothing was lost. A number without a message
    shows nothing: that message was acknowledged, or deleted by hand.
    """
    holes = Holes(stream.created_at, stream.first_sequence, frozenset())

    async def newest_up_to(sequence: int) -> tuple[Placed, bool] | None:
        """Return the newest row up to a number that the stream has a message for, and whether it is the row's."""
        nonlocal holes
        place = stream.name, stream.created_at, holes.first_sequence, sequence
        while (noted := await source.newest_at(*place, sorted(holes.numbers))) is not None:
            found = await message_id_at(js, stream.name, noted.sequence)
            if found is not None:
                return noted, found == message_id(noted.identity, noted.epoch)
            missing = await read_holes(js, stream.name)  # at once: a work queue has many
            if missing.created_at != stream.created_at:
                return None  # it was created again: the next comparison finds what went into the old one
            holes = missing._replace(numbers=holes.numbers | missing.numbers | {noted.sequence})
            place = stream.name, stream.created_at, holes.first_sequence, sequence
        return None

    end = at = stream.last_sequence
    good, bad = stream.first_sequence - 1, end + 1  # up to `good` all noted messages are there, from `bad` on none
    while good < at:
        newest = await newest_up_to(at)
        if newest is None or newest[0].sequence <= good or newest[1]:
            good = at
        else:
            bad = newest[0].sequence
        at = (good + bad) // 2
    return bad if bad <= end else None


async def message_id_at(js: JetStreamContext, stream: str, sequence: int) -> str | None:
    """Return the id of the message that has this number, empty if without; None where there is no message.

    Raises `PostroomError`.
    """
    with mapped(f"looking at message {sequence} of {stream}"), suppress(NotFoundError):
        return str(((await js.get_msg(stream, sequence)).headers or {}).get(MESSAGE_ID, ""))
    return None


class ConsumerFloors:
    """Notes how far each consumer of events is, so that what others have handled is published again for it.

    A stream takes its consumers with it, and a purge has them skip messages. So a round reads the consumers, compares
    the streams by what was noted before, and notes what it read.
    """

    def __init__(self, pool: Pool, record: Record) -> None:
        self._pool = pool
        self._record = record
        self._read: dict[tuple[str, datetime], dict[str, tuple[str, int]]] = {}

    async def read(self, link: Link) -> None:
        """Look at the consumers of the streams that events are published into; one that does not answer is left out."""
        self._read = {}
        for stream in link.streams.pictures:
            if await self._pool.fetchval(EVENTS.queries["has_stream"], stream.name):
                with suppress(*NATS_ERRORS, NotFoundError):
                    self._read[stream.name, stream.created_at] = {
                        info.name: (
                            expression_of(*filters_of(info.config)),
                            0 if info.ack_floor is None else info.ack_floor.stream_seq,
                        )
                        for info in await all_consumers(link.js, stream.name)
                        if info.config.durable_name
                    }

    async def note(self, link: Link) -> None:
        """Note what was read of the streams that are still there, if the comparison since found all that was lost."""
        complete = self._record.complete
        there = {(stream.name, stream.created_at) for stream in link.streams.pictures if complete}
        for stream, consumers in self._read.items():
            if stream in there:
                patterns, floors = zip(*consumers.values(), strict=True) if consumers else ((), ())
                await self._pool.execute(QUERIES["note_consumers"], *stream, list(consumers), patterns, floors)

    async def prune(self) -> None:
        """Forget those that were last seen before the horizon."""
        await self._pool.execute(QUERIES["forget_consumers"], await now(self._pool) - self._record.horizon)


class _Seen(NamedTuple):
    floors: Floors
    at: float  # the loop's clock


class WorkQueues:
    """Watches the work queues of a server, on one connection at a time, and in the same way its interest streams.

    What left one without having been handled is published again (docs/contract/delivery.md#delivery-25). A work queue
    looks the same after an acknowledgement and after a purge, and so does an interest stream, after the acknowledgement
    of the last consumer that a message was for. So two things are kept outside of it:

        the floors     up to which number everything was acknowledged, as a queue's consumers reported when nothing
                       was wrong, and which numbers above that were missing; they are in Postgres
        the audit      JetStream's advisories about purges and deletions, while this program is connected

    Where the audit has one, or no program listened for a while, everything above the floors that is no longer in the
    queue is published again; in a queue that was created while this program listened, nothing was purged unheard. Some
    of it was acknowledged since the queue was last seen, and comes a second time: receivers know it by its id. (Where a
    queue has very many holes, also what was above its consumer's oldest message in hand then.)

    When the floors may rise, so that no purge raises them:

    - After a search, to what they were before it: what had been purged by then was found.
    - Without one, to what they were a second ago or more, if there was no advisory since: one comes sooner.
    """

    def __init__(self, pool: Pool, sources: Sequence[PostgresSource], record: Record) -> None:
        self._pool = pool
        self._sources = sources
        self._record = record
        self._link: Link | None = None
        self._seen: dict[str, _Seen] = {}  # the streams that were searched on this connection

    async def check(self, link: Link, audit: Audit) -> int:
        """Make unpublished what was removed from the work queues of `link`; return how many messages that were."""
        if link is not self._link:  # between the connections advisories were missed
            self._link = link
            self._seen.clear()
        elif not audit.hears:
            _log.warning("purges_not_heard", subject=ADVISORIES, detail="let the worker's NATS user subscribe to it")
        work_queues = [picture for picture in link.streams.pictures if picture.forgets]
        return sum([await self._check(link, audit, stream) for stream in work_queues])

    async def _check(self, link: Link, audit: Audit, stream: StreamPicture) -> int:
        floors = await read_floors(link.js, stream.name)
        taken = audit.take(stream.name)
        before = self._seen.pop(stream.name, None)  # after an error from here on, the next check begins with a search
        at = asyncio.get_running_loop().time()
        if before is not None and before.floors.created_at != floors.created_at:
            before = None
        if before is None and audit.hears and (stream.name, floors.created_at) not in audit.before:
            before = _Seen(floors, at)  # it was created while this program listened: nothing was purged
        if taken or before is None:
            found, complete = await self._search(link, stream, floors)
            if complete:
                self._seen[stream.name] = _Seen(floors, at)
            return found
        if at - before.at >= _ADVISORY_SECONDS:
            await self._raise(stream.name, before.floors)
            before = _Seen(floors, at)
        self._seen[stream.name] = before
        return 0

    async def _search(self, link: Link, stream: StreamPicture, floors: Floors) -> tuple[int, bool]:
        """Publish again what is missing, and raise the floors to `floors`, which were read before this search.

        Return how many messages that were, and whether it was all: a publisher may be publishing some.
        """
        complete = await all_marked(self._pool)
        holes = await read_holes(link.js, stream.name)
        since = await now(self._pool) - stream.reach(self._record.horizon)
        found = 0
        for source in self._sources if stream.keeps_all else ():
            taken_out = await source.requeue_taken_out(stream.name, holes, since)
            self._record.requeued[source.name] += taken_out
            found += taken_out
        if complete:
            await self._raise(stream.name, floors)
        if found:
            _log.warning("work_queue_taken_out", stream=stream.name, requeued=found)
        return found, complete

    async def _raise(self, stream: str, floors: Floors) -> None:
        filters = floors.by_filter
        values = (list(filters), [expression_of(subjects) for subjects in filters], list(filters.values()))
        await self._pool.execute(QUERIES["raise_floors"], stream, floors.created_at, *values)
        if floors.gone:
            gone = ",".join(f"[{start},{end})" for start, end in floors.gone)
            place = stream, floors.created_at, floors.first_sequence
            await self._pool.execute(QUERIES["note_holes"], *place, f"{{{gone}}}")

    async def prune(self) -> None:
        """Forget what is known of streams that were last seen before the horizon."""
        before = await now(self._pool) - self._record.horizon
        await self._pool.execute(QUERIES["forget_floors"], before)
        await self._pool.execute(QUERIES["forget_holes"])
