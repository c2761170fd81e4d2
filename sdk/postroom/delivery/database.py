"""The tables of delivering: bringing a database to this program's version, and opening it.

They stand in the broker's database, or in one of a service's own that has nothing but them.
"""

from __future__ import annotations

from typing import Final

from postroom.chassis import postgres
from postroom.chassis.postgres import Pool

ROOM: Final = "postroom.delivery"


async def migrate(url: str) -> list[str]:
    """Bring the database to this program's version and return the names of what was applied, in order.

    Raises `Fatal`: 69 where Postgres can't be reached, 78 where the database is newer than the program.
    """
    return await postgres.migrate(url, ROOM)


async def open_database(url: str, *, name: str, connections: int) -> Pool:
    """Open a pool that Postgres knows as `name`, and check the tables' version; the caller closes it.

    Raises `Fatal`: 69 where Postgres can't be reached, 78 where its tables are not this program's.
    """
    pool = await postgres.open_pool(url, name=name, connections=connections)
    try:
        async with pool.acquire() as connection:
            await postgres.check_version(connection, ROOM, migrate_with="postroom broker migrate")
    except BaseException:
        await pool.close()
        raise
    return pool
