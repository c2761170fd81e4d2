"""What left a work queue without having been handled is published again (docs/contract/delivery.md#delivery-25).

A work queue forgets what was acknowledged, and what was purged, alike. So two things are kept apart from it:

    the floors     up to which number everything was acknowledged, as the queue's consumers said when nothing was wrong,
                   and what was gone behind that; they are in Postgres
    the audit      what JetStream tells of purges and deletions, for as long as one is connected

Where the audit tells of one, or nobody listened for a while, whatever is above the floors and no longer in the queue is
published again; in a queue that was made while somebody listened, nothing was purged unheard. Some of it was
acknowledged since the queue was last seen, and comes a second time: receivers know it by its id. (Where a queue has
very many holes, also what was behind its consumer's oldest message in hand then.)

When the floors may rise, so that no purge raises them:

- After a search, to what they were before it: what had been purged by then was found.
- Without one, to what they were a second ago or more, if nothing was heard since: a purge is told of sooner.
"""

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import structlog

from postroom.chassis.postgres import Pool
from postroom.delivery.publishing.link import ADVISORIES, Audit, Link
from postroom.delivery.publishing.postgres import QUERIES, PostgresSource, all_marked, now
from postroom.delivery.publishing.record import Record
from postroom.delivery.publishing.streams import Floors, StreamPicture, read_floors, read_holes, subject_pattern

_log = structlog.get_logger(__name__)

_TOLD_SECONDS: Final = 1.0  # after a purge it was told of: many times what a server needs


class _Seen(NamedTuple):
    floors: Floors
    at: float  # the loop's clock


class WorkQueues:
    """Watches the work queues of a server, on one connection at a time."""

    def __init__(self, pool: Pool, sources: Sequence[PostgresSource], record: Record) -> None:
        self._pool = pool
        self._sources = sources
        self._record = record
        self._link: Link | None = None
        self._seen: dict[str, _Seen] = {}  # the streams that were searched on this connection

    async def check(self, link: Link, audit: Audit) -> int:
        """Make unpublished what was taken out of the work queues of `link`; return how many messages that were."""
        if link is not self._link:  # nobody listened between the connections
            self._link = link
            self._seen.clear()
        elif not audit.hears:
            _log.warning("purges_not_heard", subject=ADVISORIES, detail="let the worker's NATS user subscribe to it")
        work_queues = [picture for picture in link.streams.pictures if picture.work_queue]
        return sum([await self._check(link, audit, stream) for stream in work_queues])

    async def _check(self, link: Link, audit: Audit, stream: StreamPicture) -> int:
        floors = await read_floors(link.js, stream.name)
        taken = audit.take(stream.name)
        before = self._seen.pop(stream.name, None)  # what fails from here on is begun anew with a search
        at = asyncio.get_running_loop().time()
        if before is not None and before.floors.created_at != floors.created_at:
            before = None
        if before is None and audit.hears and (stream.name, floors.created_at) not in audit.before:
            before = _Seen(floors, at)  # it was made while somebody listened: nothing was purged
        if taken or before is None:
            found, complete = await self._search(link, stream, floors)
            if complete:
                self._seen[stream.name] = _Seen(floors, at)
            return found
        if at - before.at >= _TOLD_SECONDS:
            await self._raise(stream.name, before.floors)
            before = _Seen(floors, at)
        self._seen[stream.name] = before
        return 0

    async def _search(self, link: Link, stream: StreamPicture, floors: Floors) -> tuple[int, bool]:
        """Publish again what is missing, and raise the floors to `floors`, which are older than this look at it.

        Return how many messages that were, and whether it was all: a publisher may have some under way.
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
        patterns = [f"^({subject_pattern([subjects]).pattern})$" for subjects in filters]
        values = (list(filters), patterns, list(filters.values()))
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
