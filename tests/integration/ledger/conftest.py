"""One migrated database for all these tests; each begins jobs of its own in it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import pytest
from support.databases import migrated_database
from support.ledgers import Jobs

from embedded import EmbeddedPostgres
from postroom.chassis.postgres import migrate
from postroom.ledger import ROOMS


@pytest.fixture(scope="session")
def jobs_database(postgres_server: EmbeddedPostgres) -> str:
    return migrated_database(postgres_server, "jobs", lambda url: migrate(url, *ROOMS))


@pytest.fixture
async def jobs(jobs_database: str) -> AsyncIterator[Jobs]:
    connection = await asyncpg.connect(jobs_database)
    yield Jobs(connection)
    await connection.close()
