"""The record: what JetStream has lost is published again from Postgres (spec delivery.md, "Postgres is the record").

A server that loses power may lose the newest messages of a stream, or the whole stream; an operator may purge or delete
one. Whatever was published says in its row into which stream it went (the name, and when that stream was created) and
which number it got, so that comparing with the stream shows what is gone:

    the stream was created at another time      everything that went into the other one
    its last number is smaller than a row's     the newest
    its first number is larger than a row's     it was purged; only where nothing but age takes messages out of it
    it gives a number away a second time        what had it first (the publisher sees that when it marks)

What is gone, is younger than the horizon, and is not confirmed by a consumer's inbox becomes unpublished again, under
the next epoch. The publisher does the rest. A comparison may take for lost what is there (in a stream made anew a
moment ago); then the message is in the stream twice, which is harmless: inboxes know it by its id, without the epoch.

What a comparison cannot see: messages purged from a work queue (their absence is how it says that they are done), and
single messages deleted from the middle of a stream. `redrive` publishes these again by hand.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
import structlog

from chassis.postgres import Connection, Pool
from chassis.sql import load_queries
from delivery.publishing.settings import RecordSettings
from delivery.publishing.source import EVENTS, Source
from delivery.publishing.streams import StreamPicture

_log = structlog.get_logger(__name__)

_QUERIES: Final = load_queries(__package__, "record.sql")
_STEP: Final = 5000  # rows of one statement
_AGE_MARGIN: Final = timedelta(minutes=1)  # before its age limit, a message counts as gone by age


class Redriven(msgspec.Struct, frozen=True):
    """How many messages of one source are published again, or would be."""

    source: str
    messages: int


class Record:
    """Compares streams with what was published into them; one for all publishers of a process."""

    def __init__(self, pool: Pool, sources: Sequence[Source], settings: RecordSettings) -> None:
        self._pool = pool
        self._sources = sources
        self._settings = settings
        self._compared: dict[str, StreamPicture] = {}
        self.requeued = dict.fromkeys((source.name for source in sources), 0)

    @property
    def horizon(self) -> timedelta:
        """How old what was lost may be."""
        return timedelta(days=self._settings.horizon_days)

    async def compare(self, look: Callable[[], Awaitable[Sequence[StreamPicture]]]) -> int:
        """Make unpublished what the streams have lost; return how many messages that were.

        The time is taken before the streams are looked at: what was published by then, they must have.
        """
        async with self._pool.acquire() as connection:
            until = await connection.fetchval(_QUERIES["now"])
            requeued = 0
            for picture in await look():
                for source in self._sources:
                    requeued += await self._compare(connection, source, picture, until)
                self._compared[picture.name] = picture
            return requeued

    async def _compare(self, connection: Connection, source: Source, stream: StreamPicture, until: datetime) -> int:
        requeued = 0
        for query, values, since in self._searches(stream, until):
            bounds = (stream.name, *values, since, until)
            found = await _requeue_all(connection, source, source.queries[query], bounds)
            if found:
                _log.warning(f"stream_{query.removeprefix('find_')}", stream=stream.name, requeued=found)
            requeued += found
        self.requeued[source.name] += requeued
        return requeued

    def _searches(self, stream: StreamPicture, until: datetime) -> list[tuple[str, tuple[Any, ...], datetime]]:
        """Return the searches that may find something: query, its values, and the oldest that matters."""
        before = self._compared.get(stream.name)
        since = until - self.horizon
        searches: list[tuple[str, tuple[Any, ...], datetime]] = [
            ("find_behind_the_end", (stream.last_sequence,), since)
        ]
        if before is None or before.created_at != stream.created_at:
            searches.append(("find_of_another_stream", (stream.created_at,), since))
        if stream.keeps_all and (before is None or before.first_sequence != stream.first_sequence):
            age = timedelta(seconds=stream.max_age_seconds) - _AGE_MARGIN if stream.max_age_seconds else self.horizon
            searches.append(("find_before_the_beginning", (stream.first_sequence,), max(since, until - age)))
        return searches

    async def prune(self) -> None:
        """Delete the events whose time is over; deliveries go with their messages."""
        async with self._pool.acquire() as connection:
            before = await connection.fetchval(_QUERIES["now"]) - timedelta(days=self._settings.keep_days)
            while await connection.execute(EVENTS.queries["prune"], before, _STEP) == f"DELETE {_STEP}":
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

    What a consumer's inbox has as handled is left out unless `confirmed`. A worker does the publishing.
    """
    until = await connection.fetchval(_QUERIES["now"])
    for source in sources:
        if dry_run:
            everything = await connection.fetch(source.queries["find_since"], since, until, stream, confirmed, None)
            yield Redriven(source.name, len(everything))
        else:
            bounds = (since, until, stream, confirmed)
            yield Redriven(source.name, await _requeue_all(connection, source, source.queries["find_since"], bounds))


async def _requeue_all(connection: Connection, source: Source, find: str, bounds: tuple[Any, ...]) -> int:
    """Requeue what `find` finds, step by step: what is requeued, or published again since, is not found again."""
    requeued = 0
    while keys := [row[0] for row in await connection.fetch(find, *bounds, _STEP)]:
        await connection.execute(source.queries["requeue"], keys)
        requeued += len(keys)
    return requeued
