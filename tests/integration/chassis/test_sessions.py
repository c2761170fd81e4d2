"""What our connections have set for themselves, whatever the server or the database has for everybody."""

from __future__ import annotations

import asyncpg

from postroom.chassis.postgres import connected, open_pool


async def _let_the_database_set(url: str, *settings: str) -> None:
    name = url.partition("@/")[2].partition("?")[0]
    operator = await asyncpg.connect(url)
    for setting in settings:  # on one connection: they hold for the next
        await operator.execute(f"ALTER DATABASE {name} SET {setting}")
    await operator.close()


async def test_a_transaction_is_read_committed_whatever_the_database_says(database_url: str) -> None:
    await _let_the_database_set(database_url, "default_transaction_isolation = 'serializable'")
    pool = await open_pool(database_url, name="any", connections=1)
    assert await pool.fetchval("SHOW transaction_isolation") == "read committed"
    await pool.close()


async def test_a_migration_or_a_check_takes_its_time_whatever_the_database_says(database_url: str) -> None:
    await _let_the_database_set(database_url, "statement_timeout = '1ms'", "lock_timeout = '1ms'")
    async with connected(database_url) as connection:
        await connection.execute("SELECT pg_sleep(0.05)")
        assert await connection.fetchval("SHOW lock_timeout") == "0"


async def test_postgres_compiles_no_statement_whatever_the_database_says(database_url: str) -> None:
    await _let_the_database_set(database_url, "jit = on")
    pool = await open_pool(database_url, name="any", connections=1)
    assert await pool.fetchval("SHOW jit") == "off"
    await pool.close()
