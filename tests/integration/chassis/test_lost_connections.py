"""Connections that Postgres ends while a pool hands them out: whatever is raised then is known as such."""

from __future__ import annotations

import asyncio
from collections import Counter

import asyncpg

from postroom.chassis.postgres import POSTGRES_ERRORS, open_pool

KILL = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'doomed'"
USERS = 4
LOST = 300  # enough that each way of losing one was met many times


async def test_each_way_of_losing_a_connection_is_an_error_that_is_waited_out(database_url: str) -> None:
    pool = await open_pool(database_url, name="doomed", connections=3)
    lost: Counter[type[Exception]] = Counter()

    async def use() -> None:
        while lost.total() < LOST:
            try:
                async with pool.acquire() as connection, connection.transaction():
                    await connection.fetchval("SELECT 1")
            except POSTGRES_ERRORS as error:
                lost[type(error)] += 1
            await asyncio.sleep(0)

    killer = await asyncpg.connect(database_url)
    users = asyncio.gather(*(use() for _ in range(USERS)))
    try:
        while not users.done():
            await killer.execute(KILL)
            await asyncio.sleep(0)
        await users
    finally:
        users.cancel()
        pool.terminate()
        await killer.close()
