"""Spark on `local[2]`: a DataFrame into Postroom until `queued`, beside the batch route; and a history out of it.

Writing and reading run as a process of their own (`python -m bench.spark sink SOCKET ROWS` or `source DATABASE_URL`): a
session, something short that warms it up, and what is timed. It prints the seconds that this took.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import asyncpg

from bench.driver import BODY_BYTES
from bench.mailroom import broker
from bench.processes import daemon, output_of
from bench.report import Measure, Results
from bench.sends import STREAMS, stream
from postroom._wire.sql import load_queries

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader, SparkSession

_SUNK: Final = 100_000  # rows
_WARM_UP: Final = 2_000
_HISTORY: Final = 1_000_000  # messages
_READS: Final = 3
_FILL_SECONDS: Final = 600.0
_QUERIES: Final = load_queries("bench", "history.sql")
_NARROW: Final = "history_id BIGINT, mesh STRING, sender STRING, accepted_at TIMESTAMP"
_LOG: Final = Path(__file__).parents[1] / "pipeline" / "log4j2.properties"


async def sink(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Write bodies of 1 KiB through the sink, and the same number into the batch route."""
    rows = round(_SUNK * scale)
    with daemon(place / "sink") as daemon_:
        (took,) = json.loads(output_of(["bench.spark", "sink", str(daemon_.socket), str(rows)]))
    with daemon(place / "route") as daemon_:
        streamed = stream(daemon_, first=0, lines=rows // STREAMS)
    yield Measure('rows of df.write.format("postroom")', rows / took, "/s")
    yield Measure("of the batch route", rows / took / streamed, "x")


async def history(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Read the same history three times, each in a session of its own: whole messages, and its own columns alone."""
    rows = round(_HISTORY * scale)
    async with broker(place / "broker") as running:
        connection = await asyncpg.connect(running.database_url)
        await connection.execute(_QUERIES["fill"], rows, timeout=_FILL_SECONDS)
        await connection.execute(_QUERIES["settle"], timeout=_FILL_SECONDS)
        await connection.close()
        for _ in range(_READS):
            whole, narrow = json.loads(output_of(["bench.spark", "source", running.database_url]))
            yield Measure("whole messages of 1 KiB", rows / whole, "/s")
            yield Measure("columns of the history alone", rows / narrow, "/s")


def main() -> None:
    """Write or read, and print how long what was timed took."""
    spark = _session()
    took = []
    if sys.argv[1] == "sink":
        options = {"to": "topic:orders", "id": "order_id", "body": "body", "socket": sys.argv[2]}
        for name, rows in (("warm-up", _WARM_UP), ("timed", int(sys.argv[3]))):
            orders = spark.range(rows, numPartitions=2).selectExpr(
                "id AS order_id", f"repeat('x', {BODY_BYTES}) AS body"
            )
            began = time.perf_counter()
            orders.write.format("postroom").options(**options, namespace=name).mode("append").save()
            took.append(time.perf_counter() - began)
    else:

        def source() -> DataFrameReader:
            return spark.read.format("postroom_history").option("database_url", sys.argv[2])

        for frame in (source().schema(_NARROW), source(), source().schema(_NARROW)):  # the first warms up
            began = time.perf_counter()
            frame.load().write.format("noop").mode("overwrite").save()
            took.append(time.perf_counter() - began)
    print(json.dumps(took[1:]))


def _session() -> SparkSession:
    """Start Spark on two cores of this machine."""
    # Spark is large, and the other benchmarks do without
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from postroom.spark.session import prepare_environment  # noqa: PLC0415

    prepare_environment()
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={_LOG}")
        .getOrCreate()
    )


if __name__ == "__main__":
    main()
