"""One migrated database for all these tests; each begins jobs of its own in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest
from ledgers import Jobs

from embedded import EmbeddedPostgres
from ledger.database import migrate


@pytest.fixture(scope="session")
def jobs_database(postgres_server: EmbeddedPostgres) -> str:
    url = postgres_server.url_of("jobs")

    async def create() -> None:
        server = await asyncpg.connect(postgres_server.url)
        await server.execute("CREATE DATABASE jobs")
        await server.close()
        await migrate(url)

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:  # leaves the loop of the test plugin alone
        runner.run(create())
    return url


@pytest.fixture
async def jobs(jobs_database: str) -> AsyncIterator[Jobs]:
    connection = await asyncpg.connect(jobs_database)
    yield Jobs(connection)
    await connection.close()
