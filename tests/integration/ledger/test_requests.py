"""Requests whose answers are overdue, where there are many of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest
from support.ledgers import Jobs

from postroom.ledger.engine import MOST_AT_ONCE
from postroom.ledger.legs import QUERIES

MANY = 5000
OVERDUE = """
WITH job AS (
  INSERT INTO ledger.job (id, context, flow) VALUES (gen_random_uuid(), 'sea', $1) RETURNING id
), activity AS (
  INSERT INTO ledger.activity (id, job_id, name, request) SELECT gen_random_uuid(), id, 'extract', 'null' FROM job
  RETURNING id
)
INSERT INTO ledger.request (id, activity_id, flow, timeout, asks, due_at)
SELECT gen_random_uuid(), id, $1, interval '1 minute', 2, now() - number * interval '1 second'
FROM activity, generate_series(1, $2::integer) AS number
"""
EXPLAIN = "EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE overdue ('many', 'sea', 100)"


@pytest.fixture
async def many(jobs: Jobs, jobs_database: str) -> AsyncIterator[asyncpg.Pool[asyncpg.Record]]:
    """Let thousands of answers be overdue, those of a flow that nobody runs longer than the others."""
    for flow in ("many", "abandoned"):
        await jobs.connection.execute(OVERDUE, flow, MANY)
    await jobs.connection.execute("ANALYZE ledger.request")
    async with asyncpg.create_pool(jobs_database, min_size=1, max_size=2) as pool:
        yield pool
    await jobs.connection.execute("DELETE FROM ledger.job WHERE flow IN ('many', 'abandoned')")


async def test_of_many_overdue_requests_one_look_reads_no_more_than_it_takes(
    jobs: Jobs, many: asyncpg.Pool[asyncpg.Record]
) -> None:
    found = await many.fetch(QUERIES["find_overdue"], "many", "sea", MOST_AT_ONCE)
    assert len(found) == MOST_AT_ONCE
    await jobs.connection.execute(f"PREPARE overdue (text, text, bigint) AS {QUERIES['find_overdue']}")
    (plan,) = json.loads(await jobs.connection.fetchval(EXPLAIN))
    assert max(_rows(plan["Plan"])) <= 2 * MOST_AT_ONCE


def _rows(node: dict[str, Any]) -> Iterator[int]:
    """Say how many rows each node of a plan read."""
    yield round(node["Actual Rows"]) + node.get("Rows Removed by Filter", 0)
    for below in node.get("Plans", ()):
        yield from _rows(below)
