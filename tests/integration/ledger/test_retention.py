"""Jobs that ended long ago are removed, a part at a time; their ids stay taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from support.clocks import clock_ahead
from support.ledgers import Jobs
from support.waiting import until_so

from postroom.chassis.postgres import Pool, migrate
from postroom.errors import Conflict
from postroom.ledger import ROOMS
from postroom.ledger.operations import JobRetention, cancel_job, start
from postroom.ledger.primitives import Child, Start, fail_activity, finish_job, spawn
from postroom.worker.config import load_config
from postroom.worker.publication import open_publication

TABLES = ("job", "activity", "guid", "request", "operator_log")


@pytest.fixture
async def jobs(database_url: str) -> AsyncIterator[Jobs]:
    await migrate(database_url, *ROOMS)
    connection = await asyncpg.connect(database_url)
    yield Jobs(connection)
    await connection.close()


@pytest.fixture
async def pool(jobs: Jobs, database_url: str) -> AsyncIterator[Pool]:
    del jobs  # they have made the tables
    async with asyncpg.create_pool(database_url, min_size=1) as opened:
        yield opened


async def completed(jobs: Jobs, children: int) -> Start:
    """Run a job whose root spawns children, each of which asks and is answered."""
    begun = await jobs.asked()
    ids = [uuid4() for _ in range(children)]
    await spawn(jobs.connection, await jobs.enter(begun.root), [Child(each, "load") for each in ids])
    for number, each in enumerate(ids):
        await jobs.ask(each)
        leg2 = await jobs.enter(each, f"m-{number}")
        if (await spawn(jobs.connection, leg2)).threshold_hit:
            await finish_job(jobs.connection, leg2)
    return begun


async def age(jobs: Jobs, job: UUID, days: int) -> None:
    await jobs.connection.execute("ALTER TABLE ledger.job DISABLE TRIGGER ends_once")
    await jobs.connection.execute(
        "UPDATE ledger.job SET ended_at = ended_at - $2 * interval '1 day' WHERE id = $1", job, days
    )
    await jobs.connection.execute("ALTER TABLE ledger.job ENABLE TRIGGER ends_once")


async def rows(jobs: Jobs) -> dict[str, int]:
    return {table: await jobs.connection.fetchval(f"SELECT count(*) FROM ledger.{table}") for table in TABLES}  # noqa: S608 - our own names


async def sweep(pool: Pool, *, rows: int = 1000) -> int:
    return await JobRetention(pool, 90).sweep(rows)


class Noting:
    """A pool that notes how many rows each statement deleted."""

    def __init__(self, pool: Pool) -> None:
        self.fetchval = pool.fetchval
        self.deleted: list[int] = []
        self._pool = pool

    async def execute(self, *statement: Any) -> str:
        done = await self._pool.execute(*statement)
        self.deleted.append(int(done.rpartition(" ")[2]))
        return done


@pytest.mark.parametrize("slice_", [1, 1000])
async def test_a_job_goes_whole_after_its_time_and_not_before(jobs: Jobs, pool: Pool, slice_: int) -> None:
    old, young = await completed(jobs, 3), await completed(jobs, 2)
    await age(jobs, old.job, 91)
    await age(jobs, young.job, 89)

    noting: Any = Noting(pool)
    assert await sweep(noting, rows=slice_) == 1
    assert max(noting.deleted) <= slice_
    assert (await jobs.job(young.job))[0] == "completed"
    assert await rows(jobs) == {"job": 1, "activity": 3, "guid": 3, "request": 3, "operator_log": 0}
    assert await sweep(pool) == 0


async def test_no_job_goes_by_a_clock_that_is_ahead(jobs: Jobs, pool: Pool) -> None:
    await age(jobs, (await completed(jobs, 1)).job, 91)
    retention = JobRetention(pool, 90)
    retention._clock = clock_ahead()
    assert await retention.sweep() == 0


async def test_a_worker_keeps_jobs_for_as_long_as_its_config_says(
    jobs: Jobs, database_url: str, tmp_path: Path
) -> None:
    ended = await completed(jobs, 1)
    await age(jobs, ended.job, 4)
    for keep_days, removed in ((5, 0), (3, 1)):
        file = tmp_path / "worker.toml"
        file.write_text(
            f'database_url = "{database_url}"\n[nats]\nurl = "nats://127.0.0.1:1"\n[jobs]\nkeep_days = {keep_days}\n'
        )
        async with open_publication(load_config(file)) as publication:
            assert await publication.job_retention.sweep() == removed


async def test_what_may_go_on_stays_however_old_it_is(jobs: Jobs, pool: Pool) -> None:
    running, failed, cancelled = await jobs.asked(), await jobs.asked(), await jobs.asked()
    await fail_activity(jobs.connection, failed.root, "no disk")
    await cancel_job(jobs.connection, cancelled.job, actor="alice", reason="the wrong day")
    await jobs.connection.execute(
        "UPDATE ledger.job SET started_at = started_at - interval '1 year' WHERE state = 'running'"
    )
    for each in (failed, cancelled):
        await age(jobs, each.job, 365)

    assert await sweep(pool) == 1
    assert [(await jobs.job(each.job))[0] for each in (running, failed)] == ["running", "failed"]
    assert await rows(jobs) == {"job": 2, "activity": 2, "guid": 0, "request": 2, "operator_log": 0}


async def test_a_job_that_was_removed_is_not_begun_again(jobs: Jobs, pool: Pool) -> None:
    begun = await completed(jobs, 1)
    await age(jobs, begun.job, 91)
    await sweep(pool)
    events = await jobs.events(begun.job)

    assert not await start(jobs.connection, begun)
    assert (await rows(jobs))["job"] == 0
    assert await jobs.events(begun.job) == events
    with pytest.raises(Conflict, match="belongs to a job with another flow or request"):
        await start(jobs.connection, begun._replace(flow="another"))


async def test_a_job_that_is_being_removed_is_not_begun_beside(jobs: Jobs, database_url: str) -> None:
    begun = await completed(jobs, 1)
    await age(jobs, begun.job, 91)
    removing = await asyncpg.connect(database_url)
    async with removing.transaction():
        await removing.execute("DELETE FROM ledger.job WHERE id = $1", begun.job)
        await removing.execute(
            "INSERT INTO ledger.removed_job (id, context, flow) VALUES ($1, $2, $3)",
            begun.job,
            begun.context,
            begun.flow,
        )
        starting = asyncio.create_task(start(jobs.connection, begun))
        await until_so(lambda: removing.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))
    await removing.close()

    assert not await starting
    assert (await rows(jobs))["job"] == 0
