"""The Spark source over a history of a million messages of 1 KiB, on `local[2]`: whole messages, and the history alone.

The reading runs as a process of its own (`python -m bench.history DATABASE_URL`): a session, a read that warms it up,
and the two that are timed. It prints the seconds that these took.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import asyncpg

from bench.mailroom import broker
from bench.report import Floor, judge_floor
from bench.spark_session import output_of_spark, session
from postroom._wire.sql import Queries

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader

ROWS: Final = 1_000_000
_GOAL: Final = 100_000.0
_FILL_SECONDS: Final = 600.0
_QUERIES: Final = Queries(Path(__file__).with_name("history.sql").read_text("utf-8"))
_NARROW: Final = "history_id BIGINT, mesh STRING, sender STRING, accepted_at TIMESTAMP"


def spark_source(directory: Path, runs: int, seconds: float) -> None:  # noqa: ARG001 - a number of rows, not a time
    """Read the same history several times."""
    found = asyncio.run(_measure(directory / "history", runs))
    print(f"the Spark source, local[2], {ROWS:,} messages")
    judge_floor(Floor("whole messages of 1 KiB", [ROWS / whole for whole, _ in found], _GOAL))
    judge_floor(Floor("columns of the history alone", [ROWS / narrow for _, narrow in found], _GOAL))


async def _measure(directory: Path, runs: int) -> list[tuple[float, float]]:
    async with broker(directory) as running:
        connection = await asyncpg.connect(running.database_url)
        await connection.execute(_QUERIES["fill"], ROWS, timeout=_FILL_SECONDS)
        await connection.execute(_QUERIES["settle"], timeout=_FILL_SECONDS)
        await connection.close()
        return [tuple(json.loads(output_of_spark(["bench.history", running.database_url]))) for _ in range(runs)]


def main() -> None:
    """Read, and print how long the timed reads took."""
    spark = session()

    def source() -> DataFrameReader:
        return spark.read.format("postroom_history").option("database_url", sys.argv[1])

    took = []
    for frame in (source().schema(_NARROW), source(), source().schema(_NARROW)):  # the first warms up
        began = time.perf_counter()
        frame.load().write.format("noop").mode("overwrite").save()
        took.append(time.perf_counter() - began)
    print(json.dumps(took[1:]))


if __name__ == "__main__":
    main()
