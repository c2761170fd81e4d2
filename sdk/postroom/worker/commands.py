"""What a worker's program can be asked for, each as one call, for the command line and `python -m postroom.worker`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import acting
from postroom.delivery.database import open_database
from postroom.delivery.publishing import Backlog, PostgresSource, sources_of
from postroom.delivery.publishing.operations import (
    Dropped,
    Failing,
    Redriven,
    drop_failing,
    list_dropped,
    list_failing,
    redrive,
)
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
        actor = await _actor(sources)
        return await redrive(sources, actor=actor, since=since, stream=stream, confirmed=confirmed, dry_run=dry_run)


async def ask_failing(config: WorkerConfig, source: str, context: str | None) -> list[Failing]:
    """Return what fails in a source, of one context or of all."""
    async with _opened(config) as sources:
        return await list_failing(_named(source, sources), context)


async def drop_chosen(config: WorkerConfig, source: str, ids: Sequence[str], *, reason: str) -> None:
    """Take failing messages out of a source for good; raises `NotFound`."""
    async with _opened(config) as sources:
        await drop_failing(_named(source, sources), ids, actor=await _actor(sources), reason=reason)


async def ask_dropped(config: WorkerConfig, source: str) -> list[Dropped]:
    """Return what was dropped, by whom and why."""
    async with _opened(config) as sources:
        return await list_dropped(_named(source, sources))


async def _actor(sources: Sequence[PostgresSource]) -> str:
    async with sources[0].pool.acquire() as connection:
        return acting(connection)


def _named(name: str, sources: Sequence[PostgresSource]) -> PostgresSource:
    for source in sources:
        if source.name == name:
            return source
    raise Fatal(Exit.NOT_FOUND, f"there are no {name} in this database: it is not a broker's database")


@asynccontextmanager
async def _opened(config: WorkerConfig) -> AsyncIterator[list[PostgresSource]]:
    pool = await open_database(config.database, name="postroom-worker", connections=1)
    try:
        yield await sources_of(pool)
    finally:
        await pool.close()
