"""Workers of jobs stand still for longer than their leases, and then go on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from functools import partial
from typing import Final
from uuid import uuid4

import asyncpg
from aiohttp import web
from support import zombie_flow
from support.chain import Chain
from support.handlers import serving
from support.mailroom import MESH
from support.waiting import until_so

from faults.campaign import Missed, Run, goal
from postroom.ledger.primitives import Start, start_job

_WORKERS: Final = 3
_LEASE: Final = 0.5  # seconds
_STANDSTILL: Final = (1.3, 2.0)  # leases
_STEPS: Final = 40  # of a job
_AT_ONCE: Final = 3  # jobs
_REST_SECONDS: Final = 120.0
_SETTINGS: Final = {"FLOWS": "support.zombie_flow:flow", "JOBS_LEASE_SECONDS": _LEASE, "JOBS_CHECK_SECONDS": 0.05}

_TAKEN_OVER: Final = "SELECT coalesce(sum(attempts - 1), 0)::bigint FROM ledger.guid WHERE attempts > 1"
_RUNNING: Final = "SELECT count(*) FROM ledger.job WHERE state <> 'completed'"
_NOT_ONCE: Final = """
SELECT count(*) FROM ledger.job, unnest($1::text[]) AS step
WHERE (SELECT count(*) FROM step_effect WHERE step_effect.job = job.id AND step_effect.step = step.step) <> 1
"""


@goal("F11", "zombies of jobs", without="the fence")
async def zombies(run: Run) -> None:
    """Stop workers for longer than a lease, while others take their steps over: each step has its effect once."""
    async with serving(lambda _: web.Response()) as handler:
        chain = Chain(run.place(), await run.servers.database(), run.servers.redis_url, handler.url)
        try:
            await chain.open(worker=_SETTINGS)
            await _haunt(run, chain)
        finally:
            chain.close()


async def _haunt(run: Run, chain: Chain) -> None:
    for name in ("consumer", "agent", "reader"):
        chain.programs.pop(name).kill()
    for number in range(1, _WORKERS):
        chain.programs[f"worker {number}"] = chain.worker(chain.nats.url, _SETTINGS)
        chain.programs[f"worker {number}"].start()
    if run.without:
        for name, program in chain.programs.items():
            program.become("faults.without", run.without, "postroom.worker", "run")
            chain.restart(name)
    database = await asyncpg.connect(chain.room.database_url)
    await database.execute(zombie_flow.EFFECTS)
    jobs = 0
    while (taken := await database.fetchval(_TAKEN_OVER)) < run.size.trials:
        for _ in range(_AT_ONCE - await database.fetchval(_RUNNING)):
            await begin_job(database, _STEPS)
            jobs += 1
        await asyncio.sleep(run.chance.uniform(0, _LEASE))
        chain.revive()
        pid = chain.programs[run.chance.choice(list(chain.programs))].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(_LEASE * run.chance.uniform(*_STANDSTILL))
        finally:
            os.kill(pid, signal.SIGCONT)
        run.struck["worker stopped"] += 1
    run.trials = taken
    await each_step_took_effect_once(run, database, jobs, _STEPS)
    await database.close()


async def begin_job(database: asyncpg.Connection[asyncpg.Record], steps: int) -> None:
    """Begin a job that fans out into so many steps."""
    await start_job(database, Start(uuid4(), MESH, zombie_flow.flow.name, uuid4(), "spread", json.dumps(steps)))


async def each_step_took_effect_once(
    run: Run, database: asyncpg.Connection[asyncpg.Record], jobs: int, steps: int
) -> None:
    """Wait until all jobs are completed, and raise `Missed` unless each step had its effect once."""
    try:
        await until_so(partial(_ended, database), _REST_SECONDS)
    except TimeoutError:
        raise Missed(f"{await database.fetchval(_RUNNING)} of {jobs} jobs are not completed") from None
    names = ["spread", "completed", *map(str, range(steps))]
    wrong = await database.fetchval(_NOT_ONCE, names)
    run.figures.append(f"{jobs:,} jobs of {len(names)} steps")
    run.check(not wrong, f"{wrong} of {jobs * len(names):,} steps do not have their effect once")


async def _ended(database: asyncpg.Connection[asyncpg.Record]) -> bool:
    return not await database.fetchval(_RUNNING)
