"""What a pool's connections have set for themselves, whatever the server or the database has for everybody."""

from __future__ import annotations

import asyncpg

from postroom.chassis.postgres import open_pool


async def test_a_transaction_is_read_committed_whatever_the_database_says(database_url: str) -> None:
    name = database_url.partition("@/")[2].partition("?")[0]
    operator = await asyncpg.connect(database_url)
    await operator.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
    await operator.close()

    pool = await open_pool(database_url, name="any", connections=1)
    assert await pool.fetchval("SHOW transaction_isolation") == "read committed"
    await pool.close()
