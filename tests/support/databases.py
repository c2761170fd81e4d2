"""Migrated databases: one that a session shares, which is much quicker than a new one, or a server of a test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg

from embedded import EmbeddedPostgres


def migrated_database(server: EmbeddedPostgres, name: str, migrate: Callable[[str], Awaitable[object]]) -> str:
    """Make the database `name` in a fixture of the session, migrated; returns its address."""
    url = server.url_of(name)

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # leaves the loop of the test plugin alone
        runner.run(_create(server, name, migrate))
    return url


@asynccontextmanager
async def postgres_of_its_own(
    directory: Path, migrate: Callable[[str], Awaitable[object]]
) -> AsyncIterator[EmbeddedPostgres]:
    """Run a Postgres that a test may stop, with the migrated database `own`."""
    server = EmbeddedPostgres(directory / "postgres", durable=False)
    server.start()
    await _create(server, "own", migrate)
    yield server
    server.stop()


async def _create(server: EmbeddedPostgres, name: str, migrate: Callable[[str], Awaitable[object]]) -> None:
    connection = await asyncpg.connect(server.url)
    await connection.execute(f'CREATE DATABASE "{name}"')
    await connection.close()
    await migrate(server.url_of(name))
