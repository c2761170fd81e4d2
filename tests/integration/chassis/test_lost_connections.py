"""Connections that Postgres ends while a pool hands them out: whatever is raised then is known as such.

And those that end with their process, whatever it has forked.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter

import asyncpg
import pytest
from support.waiting import until_so

from postroom.chassis.postgres import POSTGRES_ERRORS, open_pool, why_waiting

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


async def test_a_postgres_that_does_not_answer_in_time_is_said_in_words(database_url: str) -> None:
    pool = await open_pool(database_url, name="patient", connections=1)
    try:
        with pytest.raises(TimeoutError) as hung:
            await pool.execute("SELECT pg_sleep(60)", timeout=0.05)
    finally:
        pool.terminate()
    assert why_waiting(hung.value) == "Postgres failed: no answer in time"


async def test_what_a_killed_program_had_forked_keeps_no_transaction(database_url: str) -> None:
    script = """
import asyncio, os, signal, sys
from postroom.chassis.postgres import open_pool

async def main():
    pool = await open_pool(sys.argv[1], name="killed", connections=1)
    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("CREATE TABLE held (by_nobody int)")
        if child := os.fork():
            print(child, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, database_url, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    watching = await asyncpg.connect(database_url)
    ended = "SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'killed'"
    try:
        await until_so(lambda: watching.fetchval(ended), "its transaction ended")
    finally:
        os.kill(child, signal.SIGKILL)
        await watching.close()
        await process.communicate()
    assert process.returncode == -signal.SIGKILL
