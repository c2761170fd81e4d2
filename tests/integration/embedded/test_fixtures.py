"""The fixtures of tests/conftest.py do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import asyncpg
import pytest
import redis.asyncio

REPOSITORY = Path(__file__).parents[3]


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


def test_a_suite_in_the_background_interrupts_its_children_all_the_same() -> None:
    """As `nohup make test &` starts it: with Ctrl-C ignored, which what it starts would inherit."""
    case = "tests/integration/cli/test_send.py::test_ctrl_c_half_way_says_how_far_it_was"
    command = ["/bin/sh", "-c", 'trap "" INT QUIT HUP; exec "$@"', "sh", sys.executable, "-m", "pytest", "-q", case]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
