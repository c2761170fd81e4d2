"""The tables of jobs: bringing a database to this program's version.

They stand beside delivering's: what a step sends goes through the event outbox, in the same transaction.
"""

from __future__ import annotations

from typing import Final

from postroom.chassis import postgres
from postroom.chassis.postgres import Pool

ROOMS: Final = ("postroom.delivery", "postroom.ledger")


async def migrate(url: str) -> list[str]:
    """Bring the database to this program's version and return the names of what was applied, in order.

    Raises `Fatal` as `postroom.chassis.postgres.migrate` does.
    """
    return await postgres.migrate(url, *ROOMS)


async def open_jobs_pool(url: str, *, name: str, connections: int) -> Pool:
    """Open a pool that Postgres knows as `name`, and check the tables' version; the caller closes it.

    Raises `Fatal`: 69 where Postgres can't be reached, 78 where its tables are not this program's.
    """
    pool = await postgres.open_pool(url, name=name, connections=connections)
    try:
        async with pool.acquire() as connection:
            await postgres.check_version(connection, *ROOMS, migrate_with="postroom broker migrate")
    except BaseException:
        await pool.close()
        raise
    return pool
