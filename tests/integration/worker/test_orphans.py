"""The orphan check of every night: when it is due, who runs it, and who tells of what it found."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import aiohttp
import asyncpg
import pytest
from support.histories import History
from support.mailroom import worker
from support.waiting import until_so

from broker.__main__ import find_orphans
from postroom._wire.sql import load_queries
from postroom.chassis.postgres import Pool
from postroom.worker.orphans import OrphanCheck, OrphanCheckSettings

KEPT = timedelta(days=30)
LEAD = load_queries("postroom.worker", "orphans.sql")["lead_checking"]
DAMAGE = ("CREATE TABLE lost AS SELECT * FROM mesh.topic_message", "DELETE FROM mesh.topic_message")


class Night:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    async with asyncpg.create_pool(database_url, min_size=0) as opened:
        yield opened


def history_at(url: str) -> History:
    history = History(url)
    history.accept(["id-1", "id-2"])
    return history


@pytest.fixture
def history(database_url: str) -> History:
    return history_at(database_url)


def nightly(history: History, pool: Pool, clock: Night, hour: int = 3) -> OrphanCheck:
    settings = OrphanCheckSettings(hour=hour)
    return OrphanCheck(pool, history.url, settings, events_kept=KEPT, clock=clock)


async def execute(pool: Pool, *statements: str) -> None:
    for statement in statements:
        await pool.execute(statement)


async def test_what_was_found_is_told_by_every_worker_until_a_check_finds_nothing(history: History, pool: Pool) -> None:
    await execute(pool, *DAMAGE)
    first, second = nightly(history, pool, Night()), nightly(history, pool, Night())
    for each in (first, second):
        await each.look()
        (reason,) = each.reasons()
        assert "(2)" in reason
        assert "`postroom broker orphan-check` lists their messages" in reason
    assert first.last == second.last  # one check for both

    await execute(pool, "INSERT INTO mesh.topic_message SELECT * FROM lost")
    assert await find_orphans(history.url, events_kept=KEPT) == []  # by hand
    await second.look()
    assert second.reasons() == []


async def test_a_check_is_due_at_its_hour_and_made_up_for(history: History, pool: Pool) -> None:
    due = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    check = nightly(history, pool, Night(), hour=due.hour)
    await check.look()
    assert check.last is not None
    first = check.last.at

    date = "UPDATE mesh.orphan_check SET checked_at = $1"
    await pool.execute(date, due)
    await check.look()
    assert check.last.at == due  # not yet
    await pool.execute(date, due - timedelta(seconds=1))
    await check.look()  # as if nobody had been there that night
    assert check.last.at > first


async def test_a_worker_whose_clock_is_wrong_neither_checks_again_and_again_nor_keeps_others_from_it(
    history: History, pool: Pool
) -> None:
    wrong, right = Night(), Night()
    wrong.now += timedelta(days=400)
    first, second = nightly(history, pool, wrong), nightly(history, pool, right)
    for each in (first, second, first):
        await each.look()
    assert first.last == second.last

    await pool.execute("UPDATE mesh.orphan_check SET checked_at = checked_at + interval '400 days'")  # a clock ahead
    await second.look()
    await first.look()
    assert first.last == second.last
    assert await pool.fetchval("SELECT checked_at <= clock_timestamp() FROM mesh.orphan_check")


async def test_a_check_that_another_process_is_at_is_left_to_it_and_missed_after_a_day(
    history: History, pool: Pool
) -> None:
    night = Night()
    check = nightly(history, pool, night)
    async with pool.acquire() as another:
        assert await another.fetchval(LEAD)
        await check.look()
        assert (check.last, check.reasons()) == (None, [])
        night.now += timedelta(hours=27)
        (reason,) = check.reasons()
    assert "has not run since" in reason


async def test_a_worker_tells_of_orphans_and_is_ready_all_the_same(database_url: str, nats_url: str) -> None:
    history = await asyncio.to_thread(history_at, database_url)
    await asyncio.to_thread(history.execute, DAMAGE[1])
    with worker(POSTROOM_DATABASE_URL=database_url, POSTROOM_NATS_URL=nats_url) as (_, started):
        async with aiohttp.ClientSession(started["page"]) as session:

            async def health() -> str:
                async with session.get("/health") as answer:
                    return await answer.text()

            async def told() -> bool:
                return "rows that are incomplete" in await health()

            await until_so(told)
            async with session.get("/metrics") as answer:
                assert re.search("^postroom_worker_orphans [1-9]", await answer.text(), re.MULTILINE)

            async def ready() -> bool:
                async with session.get("/ready") as answer:
                    return answer.status == 200

            await until_so(ready)
