"""Databases that a whole session shares: emptying one takes a fraction of what making another one takes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import asyncpg

from embedded import EmbeddedPostgres


def migrated_database(server: EmbeddedPostgres, name: str, migrate: Callable[[str], Awaitable[object]]) -> str:
    """Make the database `name` in a fixture of the session, migrated; returns its address."""
    url = server.url_of(name)

    async def create() -> None:
        connection = await asyncpg.connect(server.url)
        await connection.execute(f'CREATE DATABASE "{name}"')
        await connection.close()
        await migrate(url)

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # leaves the loop of the test plugin alone
        runner.run(create())
    return url
