"""The fixtures of tests/conftest.py do what they say."""

from __future__ import annotations

import asyncpg
import pytest
import redis.asyncio


@pytest.mark.parametrize("round_", [1, 2])
async def test_every_test_gets_an_empty_database(database_url: str, round_: int) -> None:
    connection = await asyncpg.connect(database_url)
    await connection.execute("CREATE TABLE seen (round integer)")
    await connection.execute("INSERT INTO seen VALUES ($1)", round_)
    assert await connection.fetchval("SELECT count(*) FROM seen") == 1
    await connection.close()


@pytest.mark.parametrize("round_", [1, 2])
async def test_every_test_gets_an_empty_redis(redis_url: str, round_: int) -> None:
    async with redis.asyncio.Redis.from_url(redis_url) as client:
        assert await client.dbsize() == 0
        await client.set("seen", round_)
