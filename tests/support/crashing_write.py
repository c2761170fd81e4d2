"""The driver of a write that is a job, killed after each of its statements: `python crashing_write.py DATABASE_URL`.

For each statement of a run there is a fresh job. A first driver (forked, since starting Python costs more than the
test) dies right after that statement, and a second one, with other partitions, runs the write again to its end.
Prints the jobs of which a driver was killed.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from itertools import count
from typing import Any
from uuid import UUID, uuid4

import asyncpg
from pyspark.sql.types import LongType, StructField, StructType

from postroom.spark.jobs import Counts, JobOfWrite
from postroom.spark.options import plan_write

ROWS = StructType([StructField("order_id", LongType())])
FIRST_RUN = [Counts(10, 0, 0)] * 3
SECOND_RUN = [Counts(0, 15, 0)] * 2
RUN_OUT = (
    "UPDATE ledger.activity SET leased_until = now() - interval '1 minute' WHERE owner IS NOT NULL",
    "UPDATE ledger.guid SET leased_until = now() - interval '1 minute' WHERE owner IS NOT NULL",
)


def die_after(nth: int) -> None:
    """Kill this process once it has the answer to its `nth` statement."""
    calls = count(1)
    for name in ("execute", "fetchrow", "fetchval"):

        @functools.wraps(original := getattr(asyncpg.Connection, name))
        async def dying(*arguments: Any, _original: Any = original, **named: Any) -> Any:
            result = await _original(*arguments, **named)
            if next(calls) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(asyncpg.Connection, name, dying)


def write(database_url: str, job: UUID, counts: list[Counts]) -> None:
    options = {"to": "topic:orders", "id": "order_id", "job": str(job), "mesh": "demo", "database_url": database_url}
    plan = plan_write(options, ROWS)
    assert plan.job is not None
    written = JobOfWrite(plan, plan.job)
    written.begin()
    written.close(counts)


def was_killed(database_url: str, job: UUID, nth: int) -> bool:
    """Run the write in a process of its own, which dies after `nth` statements, if it has so many."""
    child = os.fork()
    if not child:
        die_after(nth)
        write(database_url, job, FIRST_RUN)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


async def let_leases_run_out(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    for statement in RUN_OUT:
        await connection.execute(statement)
    await connection.close()


def main() -> None:
    database_url = sys.argv[1]
    for nth in count(1):
        job = uuid4()
        if not was_killed(database_url, job, nth):
            break
        asyncio.run(let_leases_run_out(database_url))
        write(database_url, job, SECOND_RUN)
        sys.stdout.write(f"{job}\n")


if __name__ == "__main__":
    main()
