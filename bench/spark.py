"""The Spark sink beside the batch route: rows a second from a DataFrame to the daemon's disk, on `local[2]`.

The writing runs as a process of its own (`python -m bench.spark SOCKET`): a session, a short write that warms it up,
and the one that is timed, from `save()` to its return. It prints the seconds that this took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Final

from bench.load import BODY_BYTES
from bench.processes import daemon
from bench.report import Measured, Ratio, judge, show
from bench.send import STREAMS, stream
from bench.spark_session import output_of_spark, session

ROWS: Final = 100_000
_WARM_UP: Final = 2_000  # rows
_GOAL: Final = 0.4


def spark_sink(directory: Path, runs: int, seconds: float) -> None:  # noqa: ARG001 - a number of rows, not a time
    """Measure bodies of 1 KiB through the sink, and the batch route right beside it."""
    pairs = []
    for run in range(runs):
        with daemon(directory / f"sink-{run}") as daemon_:
            written = ROWS / json.loads(output_of_spark(["bench.spark", str(daemon_.socket)]))
        with daemon(directory / f"route-{run}") as daemon_:
            pairs.append((written, stream(daemon_, first=0, lines=ROWS // STREAMS)))
    print("the Spark sink, local[2], until queued")
    show(Measured('df.write.format("postroom")', [written for written, _ in pairs]))
    show(Measured(f"POST /v1/send/batch, {STREAMS} streams", [streamed for _, streamed in pairs]))
    judge(Ratio("of the batch route", pairs, _GOAL))


def main() -> None:
    """Write twice, and print how long the second write took."""
    spark = session()
    options = {"to": "topic:orders", "id": "order_id", "body": "body", "socket": sys.argv[1]}
    for name, rows in (("warm-up", _WARM_UP), ("timed", ROWS)):
        orders = spark.range(rows, numPartitions=2).selectExpr("id AS order_id", f"repeat('x', {BODY_BYTES}) AS body")
        began = time.perf_counter()
        orders.write.format("postroom").options(**options, namespace=name).mode("append").save()
    print(time.perf_counter() - began)


if __name__ == "__main__":
    main()
