"""What a worker's program can be asked for, each as one call, for the command line and `python -m postroom.worker`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime

from postroom.chassis.postgres import acting, open_rooms
from postroom.delivery import ROOM
from postroom.delivery.publishing import Backlog, PostgresSource, sources_of
from postroom.delivery.publishing.operations import Redriven, redrive
from postroom.worker.config import WorkerConfig


async def ask_backlogs(config: WorkerConfig, context: str | None) -> dict[str, Backlog]:
    """Ask for the backlog of every source, for one context or all."""
    async with _opened(config) as sources:
        return {source.name: await source.backlog(context) for source in sources}


async def redrive_since(
    config: WorkerConfig, since: datetime, *, stream: str | None, confirmed: bool, dry_run: bool
) -> list[Redriven]:
    """Have what was published from `since` on published again, or count it."""
    async with _opened(config) as sources:
        async with sources[0].pool.acquire() as connection:
            actor = acting(connection)
        return await redrive(sources, actor=actor, since=since, stream=stream, confirmed=confirmed, dry_run=dry_run)


@asynccontextmanager
async def _opened(config: WorkerConfig) -> AsyncIterator[list[PostgresSource]]:
    pool = await open_rooms(config.database, ROOM, name="postroom-worker", connections=1)
    try:
        yield await sources_of(pool)
    finally:
        await pool.close()
