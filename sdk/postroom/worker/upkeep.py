"""Keeping streams and record in order: on each new connection before anything is published on it, and periodically.

The upkeep has a connection of its own, on which it hears what others remove from the streams; that begins a round.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import structlog

from postroom._wire.retry import Patience, retrying
from postroom._wire.unpublished import Durable
from postroom.chassis.clock import DatabaseClock
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import POSTGRES_ERRORS, Pool, why_waiting
from postroom.chassis.runtime import within
from postroom.delivery.applications import know_meshes
from postroom.delivery.durables import keep_waiting, list_durables
from postroom.delivery.errors import NATS_ERRORS
from postroom.delivery.http.inbox_messages import find_begun
from postroom.delivery.publication.link import Audit, Link
from postroom.delivery.publication.postgres import DELIVERIES, LETTERS, PostgresSource, declare_subjects
from postroom.delivery.publication.record import ConsumerFloors, Record, WorkQueues
from postroom.delivery.settings import StreamSettings
from postroom.delivery.streams import Reconciled, dead_letter_stream, default_changes, default_streams, ensure_stream
from postroom.errors import Conflict, NotPermitted, PostroomError, TryAgain, Unavailable
from postroom.once.postgres import PostgresStore
from postroom.once.registry import Registry
from postroom.worker.config import WorkerConfig

_log = structlog.get_logger(__name__)

_FIRST_SECONDS: Final = 20.0  # that a worker waits at its start for the streams of its consumers and agents
_CALL_SECONDS: Final = 5.0  # that JetStream may take to answer
_DURABLES_SECONDS: Final = 10.0  # for which the state of the consumers is cached
_DURABLES_PATIENCE: Final = 1.0  # that a scrape of the metrics waits for a new look at it
_LAG_SECONDS: Final = 30.0  # between two notes of how far behind they are: one in each minute at least
_LINK_SECONDS: Final = 0.5  # between two looks whether NATS can be asked


class Upkeep:
    """Declares streams and compares them with the record.

    `broker` is the broker's database where that is another one: its meshes are copied to this one, so that nothing is
    emitted to others.
    """

    def __init__(
        self,
        pool: Pool,
        sources: Sequence[PostgresSource],
        record: Record,
        config: WorkerConfig,
        *,
        broker: Pool | None = None,
    ) -> None:
        self._pool = pool
        self._broker = broker
        self._record = record
        self._config = config
        self._has_broker = any(source.table is DELIVERIES for source in sources)
        self._one_at_a_time = asyncio.Lock()
        self._working = asyncio.Lock()
        self._stopping = False
        self._wake = asyncio.Event()
        self._link: Link | None = None
        self._audit = Audit(self._wake.set)
        self._work_queues = WorkQueues(pool, sources, record)
        self._floors = ConsumerFloors(pool, record)
        self._clock = DatabaseClock()
        self._keys = PostgresStore(pool)  # of all tenants, topics and groups; it exists where handlers created it
        self._durables: Sequence[Durable] = ()
        self._durables_at = -math.inf  # by the loop's clock
        self._looking: asyncio.Task[None] | None = None  # at the consumers

    async def run(self) -> None:
        """Maintain the streams until `stop`; an outage of NATS or Postgres ends one round only."""
        while not self._stopping:
            self._wake.clear()
            try:
                async with self._working:
                    await self._round()
            except (PostroomError, *POSTGRES_ERRORS) as error:
                _log.warning("upkeep_failed", error=why_waiting(error))
            await within(self._config.record.check_seconds, self._wake)

    async def durables(self) -> Sequence[Durable]:
        """Return how far the durable consumers of all meshes are, as of at most ten seconds ago.

        There are none where the database has no meshes, or while NATS or Postgres does not answer at once: a later call
        has what they say.
        """
        link, now = self._link, asyncio.get_running_loop().time()
        if link is None or not self._has_broker:
            return self._durables
        if self._looking is None and now - self._durables_at >= _DURABLES_SECONDS:
            self._durables_at = now
            self._looking = asyncio.create_task(self._look_at_durables(link), name="durables")
        if (looking := self._looking) is not None:
            await asyncio.wait({looking}, timeout=_DURABLES_PATIENCE)
            if not looking.done():
                return ()
            looking.result()
        return self._durables

    async def _look_at_durables(self, link: Link) -> None:
        self._durables = ()
        try:
            with suppress(*NATS_ERRORS, *POSTGRES_ERRORS):
                meshes = [row["slug"] for row in await self._pool.fetch(DELIVERIES.queries["list_meshes"])]
                self._durables = await list_durables(link.js, meshes, await find_begun(self._pool))
        finally:
            self._looking = None

    async def note_lag(self) -> None:
        """Record how far behind the durable consumers are in each minute, until cancelled."""
        while True:
            with suppress(*POSTGRES_ERRORS):
                await keep_waiting(self._pool, await self.durables())
            await asyncio.sleep(_LAG_SECONDS if self._link is not None else _LINK_SECONDS)

    async def declare_first(self) -> None:
        """Declare the streams before their readers begin; an outage of NATS or Postgres leaves that for later."""
        try:
            await retrying(self._round, Patience(_FIRST_SECONDS))
        except (PostroomError, *POSTGRES_ERRORS) as error:
            _log.warning("upkeep_failed", error=why_waiting(error))

    async def stop(self) -> None:
        """Finish the round: nats-py could lose a cancellation during it."""
        self._stopping = True
        self._wake.set()
        async with self._working, self._one_at_a_time:
            if self._link is not None:
                await self._link.close()

    async def prepare(self, link: Link) -> None:
        """Declare what is missing and make unpublished what was lost, as seen through `link`.

        Raises `PostroomError`, and `Fatal` (78) where a stream differs from its declaration and would lose messages.
        """
        async with self._one_at_a_time:
            if not self._stopping:
                await self._connected()  # so that it hears what is done in a stream from its first message on
            await self._look(link)

    async def _round(self) -> None:
        async with self._one_at_a_time:
            link = await self._connected()
        await self._floors.read(link)  # which may take its time, and publishers wait for the lock
        async with self._one_at_a_time:
            await self._look(link)
            await self._floors.note(link)
        await self._work_queues.check(link, self._audit)
        if await self._clock.is_confirmed(self._pool):
            # delete what is old: the record of what was published, and keys, which no other program of ours deletes
            await self._work_queues.prune()
            await self._floors.prune()
            await self._record.prune()
            keep = self._config.once.keep_days
            if await self._keys.is_there() and (forgotten := await Registry(self._keys).forget_old(keep)):
                _log.info("keys_forgotten", keys=forgotten)
        if self._broker is not None:
            meshes = [row["slug"] for row in await self._broker.fetch(DELIVERIES.queries["list_meshes"])]
            await know_meshes(self._pool, meshes)

    async def _connected(self) -> Link:
        """Return an open connection that listens."""
        if self._link is None or self._link.broken:
            self._link, self._audit = None, Audit(self._wake.set)
            link = await Link.open(self._config.nats, name="postroom-worker upkeep", ack_seconds=_CALL_SECONDS)
            try:
                await link.listen(self._audit)
            except BaseException:
                await link.close()
                raise
            self._link = link
        return self._link

    async def _look(self, link: Link) -> None:
        """Declare the streams, and compare all of them with the record."""
        done: list[Reconciled] = []
        for stream in self._config.streams:
            try:
                done.append(await ensure_stream(link.js, stream))
            except Conflict as error:
                raise Fatal(Exit.CONFIG, error.problem.detail) from error
            except (Unavailable, TryAgain) as error:  # a cluster does not know its state, or has no room: until it has
                if link.broken:
                    raise
                _log.warning("stream_unavailable", stream=stream.name, detail=str(error))
        declared = [subjects for stream in self._config.streams for subjects in stream.subjects]
        await declare_subjects(self._pool, declared)
        if self._config.declare_streams:
            defaults = self._config.stream_defaults
            await link.streams.refresh(link.js)
            for row in await self._pool.fetch(DELIVERIES.queries["list_meshes"]) if self._has_broker else ():
                done += await self._declare_defaults(link, default_streams(row["slug"], defaults))
            for row in await self._pool.fetch(LETTERS.queries["list_contexts"]):
                done += await self._declare_defaults(link, [dead_letter_stream(row["context"], defaults)])
        for name, action, changes in done:
            if action != "unchanged":
                _log.info(f"stream_{action}", stream=name, changes=list(changes))
        await self._record.compare(link)

    async def _declare_defaults(self, link: Link, streams: Sequence[StreamSettings]) -> list[Reconciled]:
        """Create those streams whose subjects no stream has yet, and change existing ones to what the operator set.

        None is created while the list of streams is incomplete: one that seems to be missing may only have no leader.
        """
        done = []
        for stream in streams:
            found = link.streams.of(stream.subjects[0].replace(">", "any"))
            if found is None:
                only, due = frozenset[str](), not link.streams.missing
            else:
                only = default_changes(stream, self._config.stream_defaults)
                due = found.name == stream.name and bool(only)
            if not due:
                continue
            try:
                done.append(await ensure_stream(link.js, stream, only=only))
            except PostroomError as error:  # NATS refuses it for this stream, which stays as it is; the others go on
                if isinstance(error, NotPermitted) or (found is None and isinstance(error, Unavailable)):
                    raise
                _log.warning("stream_not_changed", stream=stream.name, detail=str(error))
        return done
