"""Jobs of writes for tests: what the database holds of them, and a driver that is held in the middle of its commit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import UUID

import asyncpg

from postroom._wire.jobs import JobTree
from postroom.ledger.operations import cancel_job, show_job
from support.waiting import until_so

T = TypeVar("T")

_START_SECONDS = 300  # of a cluster, its driver and its tasks, on a busy machine

_COMPLETIONS = (
    "SELECT payload->'result' FROM postroom.outbox_events WHERE correlation_id = $1 AND event_type = 'job_completed'"
)
_HOLD = """
CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(1);
  RETURN NEW;
END $$;
CREATE TRIGGER hold BEFORE UPDATE ON ledger.activity
  FOR EACH ROW WHEN (NEW.job_id = '{job}' AND NEW.place = {place}) EXECUTE FUNCTION public.hold();
SELECT pg_advisory_lock(1);
"""
_IS_HELD = """
SELECT EXISTS (
  SELECT FROM pg_locks JOIN pg_database ON pg_database.oid = database
  WHERE datname = current_database() AND locktype = 'advisory' AND objid = 1 AND NOT granted
)
"""
_LET_GO = "SELECT pg_advisory_unlock(1); DROP TRIGGER hold ON ledger.activity; DROP FUNCTION public.hold();"


def in_database(url: str, work: Callable[[Any], Awaitable[T]]) -> T:
    async def run() -> T:
        connection = await asyncpg.connect(url)
        try:
            return await work(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


def shown(url: str, job: UUID) -> JobTree:
    return in_database(url, lambda connection: show_job(connection, job))


def cancel(url: str, job: UUID) -> None:
    in_database(url, lambda connection: cancel_job(connection, job, actor="alice", reason="the wrong day"))


def completions(url: str, job: UUID) -> list[dict[str, Any]]:
    """Return the results of the `job_completed` that went out."""
    rows = in_database(url, lambda connection: connection.fetch(_COMPLETIONS, job))
    return [json.loads(row[0]) for row in rows]


@contextmanager
def holding(url: str, job: UUID, *, place: int) -> Iterator[Callable[[], None]]:
    """Let no driver get past the partition at `place`; what is lent returns once one stands there."""
    with asyncio.Runner() as runner:
        connection = runner.run(asyncpg.connect(url))
        runner.run(connection.execute(_HOLD.format(job=job, place=place)))

        async def is_held() -> bool:
            return bool(await connection.fetchval(_IS_HELD))

        try:
            yield lambda: runner.run(until_so(is_held, _START_SECONDS))
        finally:
            runner.run(connection.execute(_LET_GO))
            runner.run(connection.close())
