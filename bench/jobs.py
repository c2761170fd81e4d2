"""Jobs: leg-2 transitions of one worker, beside the two bare transactions that each cannot do without."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final
from uuid import UUID, uuid4

import asyncpg
from nats.js import JetStreamContext

from bench.delivering import running_streams, until_count
from bench.mailroom import MESH
from bench.processes import program
from bench.report import Floor, Measured, Ratio, judge, judge_floor, show
from embedded import EmbeddedPostgres
from postroom._wire.sql import load_queries
from postroom.delivery.subjects import event_subject
from postroom.ledger.database import migrate

TRANSITIONS: Final = 3000
_OF_A_JOB: Final = 10  # activities; the last to be answered closes it
_AT_ONCE: Final = 16  # what a worker runs at once unless it is told otherwise
_GOAL: Final = 500.0
_QUERIES: Final = load_queries("bench", "jobs.sql")
_SUBJECT: Final = event_subject(MESH, "answered", 1)


def jobs(directory: Path, runs: int, seconds: float) -> None:
    """Measure a worker on a backlog of answers; `seconds` has no meaning here."""
    del seconds
    pairs = [asyncio.run(_rates(directory / f"jobs-{run}")) for run in range(runs)]
    print(f"leg-2 transitions, jobs of {_OF_A_JOB} activities, completion included")
    judge_floor(Floor("postroom worker run", [ours for ours, _ in pairs], _GOAL))
    show(Measured(f"two bare transactions, {_AT_ONCE} connections", [theirs for _, theirs in pairs]))
    judge(Ratio("of bare transactions", pairs))


async def _rates(directory: Path) -> tuple[float, float]:
    async with running_streams(directory) as (nats_url, js):
        server = EmbeddedPostgres(directory / "postgres")
        url = server.start()
        try:
            await migrate(url)
            async with asyncpg.create_pool(url, min_size=_AT_ONCE, max_size=_AT_ONCE) as pool:
                await _prepare(pool, js)
                ours = await _worker(directory, nats_url, url, pool)
                return ours, await _bare(pool)
        finally:
            server.stop()


async def _prepare(pool: asyncpg.Pool[asyncpg.Record], js: JetStreamContext) -> None:
    """Leave activities whose requests are sent, and the answers to all of them in the stream."""
    await pool.execute(_QUERIES["create"])
    await pool.execute(_QUERIES["plan"], TRANSITIONS // _OF_A_JOB, _OF_A_JOB)
    await pool.execute(_QUERIES["begin_jobs"], MESH)
    for name in ("spawn", "complete_leg1"):
        await pool.execute(_QUERIES[name])
    for row in await pool.fetch(_QUERIES["ask"]):
        headers = {"Nats-Msg-Id": f"to-{row['id']}", "X-Causation-Id": str(row["id"])}
        await js.publish_async(_SUBJECT, b'{"rows": 1}', headers=headers, wait_stall=60)
    await js.publish_async_completed()


async def _worker(directory: Path, nats_url: str, database: str, pool: asyncpg.Pool[asyncpg.Record]) -> float:
    settings = {"NATS_URL": nats_url, "DATABASE_URL": database, "FLOWS": "bench.quiet_flow:flow", "LOG_LEVEL": "error"}
    environment = {f"POSTROOM_WORKER_{name}": value for name, value in settings.items()}
    with program(directory / "worker.log", "postroom.worker", "run", environment=environment):

        async def done() -> int:
            return int(await pool.fetchval(_QUERIES["done"]))

        before = await until_count(done, 1)
        began = time.perf_counter()
        after = await until_count(done, TRANSITIONS)
        return (after - before) / (time.perf_counter() - began)


async def _bare(pool: asyncpg.Pool[asyncpg.Record]) -> float:
    """Write a row and change it, each in a transaction, as many at once."""
    keys = [uuid4() for _ in range(TRANSITIONS)]
    began = time.perf_counter()
    await asyncio.gather(*(_one_after_another(keys[start::_AT_ONCE], pool.execute) for start in range(_AT_ONCE)))
    return TRANSITIONS / (time.perf_counter() - began)


async def _one_after_another(keys: list[UUID], execute: Callable[..., Awaitable[str]]) -> None:
    for key in keys:
        await execute(_QUERIES["raw_enter"], key)
        await execute(_QUERIES["raw_step"], key)
