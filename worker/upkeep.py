"""Keeping streams and record in order: at each new connection before anything is published on it, and now and then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import asyncpg
import structlog

from chassis.exits import Exit, Fatal
from chassis.postgres import UNREACHABLE, Pool
from delivery.publishing import DELIVERIES, Record
from delivery.publishing.link import Link
from delivery.publishing.streams import StreamPicture
from delivery.settings import StreamsConfig
from delivery.streams import Reconciled, default_streams, ensure_stream, reconcile
from postroom.errors import Conflict, PostroomError
from worker.config import WorkerConfig

_log = structlog.get_logger(__name__)


class Upkeep:
    """Declares streams and compares them with the record; `has_broker`: whether this database has meshes."""

    def __init__(self, pool: Pool, record: Record, config: WorkerConfig, *, has_broker: bool) -> None:
        self._pool = pool
        self._record = record
        self._config = config
        self._has_broker = has_broker
        self._one_at_a_time = asyncio.Lock()
        self._working = asyncio.Lock()
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Look after the streams until `stop`; NATS or Postgres away ends one round, no more."""
        while not self._stop.is_set():
            try:
                async with self._working:
                    await self._round()
            except (PostroomError, asyncpg.PostgresError, *UNREACHABLE) as error:
                _log.warning("upkeep_failed", error=str(error) or type(error).__name__)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), self._config.record.check_seconds)

    async def stop(self) -> None:
        """Finish the round; a cancellation in its midst could get lost in the client of NATS."""
        self._stop.set()
        async with self._working:
            pass

    async def look_after(self, link: Link) -> None:
        """Declare what is missing and make unpublished what was lost, as seen through `link`.

        Raises `PostroomError`, and `Fatal` (78) where a stream differs from its declaration and would lose messages.
        """

        async def look() -> Sequence[StreamPicture]:
            await link.streams.refresh(link.js)
            return link.streams.pictures

        async with self._one_at_a_time:
            await self._declare(link)
            await self._record.compare(look)

    async def _round(self) -> None:
        link = await Link.open(self._config.nats, name="postroom-worker upkeep", ack_seconds=5)
        try:
            await self.look_after(link)
        finally:
            await link.close()
        await self._record.prune()

    async def _declare(self, link: Link) -> None:
        try:
            done = await reconcile(link.js, StreamsConfig(streams=self._config.streams))
        except Conflict as error:
            raise Fatal(Exit.CONFIG, error.problem.detail) from error
        if self._config.declare_streams and self._has_broker:
            await link.streams.refresh(link.js)
            for row in await self._pool.fetch(DELIVERIES.queries["list_meshes"]):
                done += await self._declare_defaults(link, row["slug"])
        for name, action, changes in done:
            if action != "unchanged":
                _log.info(f"stream_{action}", stream=name, changes=list(changes))

    async def _declare_defaults(self, link: Link, mesh: str) -> list[Reconciled]:
        """Create the default streams of a mesh whose subjects no stream takes yet; existing ones stay as they are."""
        return [
            await ensure_stream(link.js, stream)
            for stream in default_streams(mesh, max_bytes=self._config.events_max_bytes)
            if link.streams.of(stream.subjects[0].replace(">", "any")) is None
        ]
