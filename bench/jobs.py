"""Jobs: leg-2 transitions of one worker, beside the two bare transactions that each needs, dbos and procrastinate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final
from uuid import UUID, uuid4

import asyncpg
from nats.js import JetStreamContext

from bench.delivery import rate_of
from bench.mailroom import MESH, running, streams, worker
from bench.peer_jobs import AT_ONCE, PEERS, STEPS
from bench.processes import output_of
from bench.report import Measure, Results
from bench.systems import SEES_PEERS, Missing, need
from embedded import EmbeddedPostgres
from postroom._wire.sql import load_queries
from postroom.chassis.postgres import migrate
from postroom.delivery.subjects import event_subject
from postroom.ledger import ROOMS

_TRANSITIONS: Final = 3000
_QUERIES: Final = load_queries("bench", "jobs.sql")
_SUBJECT: Final = event_subject(MESH, "answered", 1)


async def jobs(place: Path, scale: float, results: Results) -> AsyncIterator[Measure]:
    """Let a worker take a backlog of answers, each a leg 2 that does nothing, completion of the jobs included."""
    count = max(1, round(_TRANSITIONS * scale / STEPS)) * STEPS
    async with streams(place / "nats") as (nats_url, js):
        with running(EmbeddedPostgres(place / "postgres")) as url:
            await migrate(url, *ROOMS)
            async with asyncpg.create_pool(url, min_size=AT_ONCE, max_size=AT_ONCE) as pool:
                await _prepare(pool, js, count)
                servers = {"POSTROOM_NATS_URL": nats_url, "POSTROOM_DATABASE_URL": url}

                async def done() -> int:
                    return int(await pool.fetchval(_QUERIES["done"]))

                with worker(place, servers, FLOWS="bench.quiet:flow"):
                    ours = await rate_of(done, count)
                bare = await _bare(pool, count)
    yield Measure("leg-2 transitions of one worker", ours, "/s")
    yield Measure(f"of two bare transactions each, {AT_ONCE} connections", ours / bare, "x")
    for name in PEERS:
        try:
            need(name)
        except Missing as error:
            results.missing.append(str(error))
            continue
        with running(EmbeddedPostgres(place / name)) as url:
            theirs = float(output_of(["bench.peer_jobs", name, url, str(count)], SEES_PEERS))
        yield Measure(f"{name} steps", theirs, "/s")
        yield Measure(f"of {name} steps", ours / theirs, "x")


async def _prepare(pool: asyncpg.Pool[asyncpg.Record], js: JetStreamContext, count: int) -> None:
    """Leave activities whose requests are sent, and the answers to all of them in the stream."""
    await pool.execute(_QUERIES["create"])
    await pool.execute(_QUERIES["plan"], count // STEPS, STEPS)
    await pool.execute(_QUERIES["begin_jobs"], MESH)
    for name in ("spawn", "complete_leg1"):
        await pool.execute(_QUERIES[name])
    for row in await pool.fetch(_QUERIES["ask"]):
        headers = {"Nats-Msg-Id": f"to-{row['id']}", "X-Causation-Id": str(row["id"])}
        await js.publish_async(_SUBJECT, b'{"rows": 1}', headers=headers, wait_stall=60)
    await js.publish_async_completed()


async def _bare(pool: asyncpg.Pool[asyncpg.Record], count: int) -> float:
    """Write a row and change it, each in a transaction of its own, so many at once; pairs a second."""
    waiting = iter([uuid4() for _ in range(count)])

    async def work() -> None:
        async with pool.acquire() as connection:
            for name in waiting:
                await _pair(connection, name)

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return count / (time.perf_counter() - began)


async def _pair(connection: asyncpg.pool.PoolConnectionProxy[asyncpg.Record], name: UUID) -> None:
    await connection.execute(_QUERIES["raw_enter"], name)
    await connection.execute(_QUERIES["raw_step"], name)
