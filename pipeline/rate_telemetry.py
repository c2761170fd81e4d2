"""`rate-telemetry`: how many messages each member had accepted in each of the limiter's windows, for dashboards.

It writes `pipeline.rate_limit_counter`. A second run changes nothing: of two counts of a window the greater is kept.
"""

import asyncio
from typing import Annotated

import msgspec
from pyspark.sql import SparkSession

from broker.config import LimiterConfig
from pipeline.runner import History, Outcome, submitted
from pipeline.tables import QUERIES, history, migrate, write_rows
from postroom.chassis.postgres import connected

_COLUMNS = "mesh STRING, sender STRING, accepted_at TIMESTAMP"
_KEY = ("mesh", "member", "window_seconds", "window_start")


class Options(History, kw_only=True):
    """The options of `rate-telemetry`."""

    window_seconds: Annotated[
        int, msgspec.Meta(ge=1, le=86400, description="length of a window, in seconds: the limiter's")
    ] = LimiterConfig().window_seconds


def run(spark: SparkSession, options: Options) -> Outcome:
    """Count the history by mesh, member and window, and keep the counts."""
    asyncio.run(migrate(options.database_url))
    length = options.window_seconds
    windows = (
        history(spark, options)
        .schema(_COLUMNS)
        .load()
        .selectExpr(
            "mesh",
            "sender AS member",
            f"timestamp_seconds(unix_seconds(accepted_at) DIV {length} * {length}) AS window_start",
            f"{length} AS window_seconds",
        )
        .groupBy("mesh", "member", "window_start", "window_seconds")
        .count()
    )
    write_rows(windows, options.database_url, QUERIES["count_windows"], _KEY)

    async def sums() -> dict[str, int]:
        async with connected(options.database_url) as connection:
            (row,) = await connection.fetch(QUERIES["sum_windows"], length, options.mesh)
        return {"windows": row["windows"], "messages": row["messages"]}

    return Outcome(asyncio.run(sums()))


if __name__ == "__main__":
    submitted("rate-telemetry")
