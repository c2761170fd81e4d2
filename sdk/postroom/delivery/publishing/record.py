"""The record: what JetStream has lost is published again from Postgres (docs/contract/delivery.md#delivery-21).

A server that loses power may lose the newest messages of a stream, or the whole stream; an operator may purge or delete
one. Whatever was published says in its row into which stream it went (the name, and when that stream was created) and
which number it got, so that comparing with the stream shows what is gone:

    the stream was created at another time      everything that went into the other one
    its last number is smaller than a row's     the newest
    another message has a row's number          the same, where others have published since
    its first number is larger than a row's     it was purged; only where nothing but age takes messages out of it
    it gives a number away a second time        one of the two (the publisher sees that when it marks)

What is gone, is younger than the horizon, and is neither confirmed by a consumer's inbox nor settled, by the word of
a work queue's consumers (`WorkQueues`), becomes unpublished again, under the next epoch. The publisher does the rest. A
comparison may take for lost what is there (in a stream made anew a moment ago); then the message is in the stream
twice, which is harmless: inboxes know it by its id, without the epoch.

What a comparison cannot see: messages taken out of a work queue (their absence is how it says that they are done), for
which there is `WorkQueues`, and single messages deleted from the middle of another stream. `redrive` publishes these
again by hand.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
import structlog

from postroom.chassis.postgres import Connection, Pool
from postroom.chassis.sql import load_queries
from postroom.delivery.publishing.displaced import Places, first_displaced
from postroom.delivery.publishing.link import Link
from postroom.delivery.publishing.requeuing import all_marked, requeue_all
from postroom.delivery.publishing.settings import RecordSettings
from postroom.delivery.publishing.source import EVENTS, Source
from postroom.delivery.publishing.streams import StreamPicture, subject_pattern

_log = structlog.get_logger(__name__)

_QUERIES: Final = load_queries(__package__, "record.sql")
_PRUNED: Final = 5000  # rows of one statement


class Redriven(msgspec.Struct, frozen=True):
    """How many messages of one source are published again, or would be."""

    source: str
    messages: int


class _Search(NamedTuple):
    """A query of the source, and its values."""

    query: str
    bounds: tuple[Any, ...]


class Record:
    """Compares streams with what was published into them; one for all publishers of a process."""

    def __init__(self, pool: Pool, sources: Sequence[Source], settings: RecordSettings) -> None:
        self._pool = pool
        self.sources = sources
        self._settings = settings
        self._compared: dict[str, StreamPicture] = {}
        self._link: Link | None = None  # of the last comparison
        self.requeued = dict.fromkeys((source.name for source in sources), 0)

    @property
    def horizon(self) -> timedelta:
        """How old what was lost may be."""
        return timedelta(days=self._settings.horizon_days)

    async def compare(self, link: Link) -> int:
        """Make unpublished what the streams have lost; return how many messages that were. Raises `PostroomError`.

        The time is taken before the streams are looked at: what was published by then, they must have. What a stream
        lost with its beginning, or as a whole, may be marked as published only after the look; that is waited for.
        """
        async with self._pool.acquire() as connection:
            until = await connection.fetchval(_QUERIES["now"])
            await link.streams.refresh(link.js)
            pictures = link.streams.pictures
            changed = any(self._made_anew(stream) or self._shortened(stream) for stream in pictures)
            complete = not changed or await all_marked(connection)
            marked = await connection.fetchval(_QUERIES["now"])
            requeued = 0
            for picture in pictures:
                searches = self._searches(picture, until, marked)
                for source in self.sources:
                    requeued += await self._search(connection, source, searches)
                    if link is not self._link or not picture.work_queue:  # which may have more holes than messages
                        requeued += await self._search_displaced(connection, link, source, picture, until)
                if complete:
                    self._compared[picture.name] = picture
            self._link = link
            return requeued

    async def _search(self, connection: Connection, source: Source, searches: Sequence[_Search]) -> int:
        requeued = 0
        for query, bounds in searches:
            found = await requeue_all(connection, source, source.queries[query], bounds)
            if found:
                _log.warning(f"stream_{query.removeprefix('find_')}", stream=bounds[0], requeued=found)
            requeued += found
        self.requeued[source.name] += requeued
        return requeued

    async def _search_displaced(
        self, connection: Connection, link: Link, source: Source, stream: StreamPicture, until: datetime
    ) -> int:
        """Requeue the newest that the server has lost, where others have filled their places before this comparison."""
        displaced = await first_displaced(stream, Places(connection, link, source, stream).newest_at)
        if displaced is None:
            return 0
        bounds = (stream.name, displaced - 1, until - self.horizon, until)
        return await self._search(connection, source, [_Search("find_behind_the_end", bounds)])

    def _searches(self, stream: StreamPicture, until: datetime, marked: datetime) -> list[_Search]:
        """Return the searches that may find something."""
        since = until - self.horizon
        searches = [_Search("find_behind_the_end", (stream.name, stream.last_sequence, since, until))]
        if self._made_anew(stream):
            searches.append(_Search("find_of_another_stream", (stream.name, stream.created_at, since, marked)))
        if self._shortened(stream):
            since = until - stream.reach(self.horizon)
            searches.append(_Search("find_before_the_beginning", (stream.name, stream.first_sequence, since, marked)))
        return searches

    def _made_anew(self, stream: StreamPicture) -> bool:
        before = self._compared.get(stream.name)
        return before is None or before.created_at != stream.created_at

    def _shortened(self, stream: StreamPicture) -> bool:
        """Tell whether a stream begins elsewhere than it did, and not because it was full."""
        before = self._compared.get(stream.name)
        begins_elsewhere = before is None or before.first_sequence != stream.first_sequence
        return begins_elsewhere and stream.keeps_all and not stream.work_queue

    async def declare_subjects(self, subjects: Sequence[str]) -> None:
        """Note that a stream is declared for these: `postroom.emit` takes them though no mesh has their name."""
        patterns = [f"^({subject_pattern([one]).pattern})$" for one in subjects]
        if subjects:
            await self._pool.execute(_QUERIES["declare_subjects"], list(subjects), patterns)

    async def prune(self) -> None:
        """Delete the events whose time is over, and what is known of streams that are; deliveries go with messages."""
        async with self._pool.acquire() as connection:
            now = await connection.fetchval(_QUERIES["now"])
            await connection.execute(_QUERIES["forget_floors"], now - self.horizon)
            await connection.execute(_QUERIES["forget_holes"])
            before = now - timedelta(days=self._settings.keep_days)
            while await connection.execute(EVENTS.queries["prune"], before, _PRUNED) == f"DELETE {_PRUNED}":
                pass


async def redrive(
    connection: Connection,
    sources: Sequence[Source],
    *,
    since: datetime,
    stream: str | None = None,
    confirmed: bool = False,
    dry_run: bool = False,
) -> AsyncIterator[Redriven]:
    """Publish again what was published from `since` on, into `stream` or any, by hand; say how many of each source.

    What is known to be handled is left out unless `confirmed`. A worker does the publishing.
    """
    until = await connection.fetchval(_QUERIES["now"])
    for source in sources:
        if dry_run:
            everything = await connection.fetch(source.queries["find_since"], since, until, stream, confirmed, None)
            yield Redriven(source.name, len(everything))
        else:
            bounds = (since, until, stream, confirmed)
            yield Redriven(source.name, await requeue_all(connection, source, source.queries["find_since"], bounds))
