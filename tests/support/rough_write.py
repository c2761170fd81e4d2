"""A Spark program that writes orders through Postroom while things go wrong; run as `python rough_write.py …`.

One task in twenty fails after posting a part; one kills every Python worker beside its own; one is a straggler that
goes on only once another attempt of it runs, where the master speculates. Attempts and kills are noted in `--notes`.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession

from postroom import Client, NotFound
from postroom.spark.rows import RowIds

FAILS, KILLS, STRAGGLES = 3, 7, 11  # of the numbers of a partition
SECONDS = 120  # for what a task waits for
COLUMNS = "order_id long, filler string"  # a batch has to be larger than the pipes' buffers, or it waits in them
FILLER = "repeat('x', 1000) AS filler"

Batches = Iterator[pa.RecordBatch]


def rough(notes: Path, namespace: str, socket: str | None, *, speculates: bool) -> Callable[[Batches], Batches]:
    """Return what passes batches on, and makes first attempts go wrong once a part of theirs is posted."""

    def pass_on(batches: Batches) -> Batches:
        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.attemptNumber()
        (notes / f"{partition}-{attempt}").touch()
        first = ""
        for number, batch in enumerate(batches):
            first = first or str(batch.column("order_id")[0])
            if number == 4 and attempt == 0:
                go_wrong(notes, partition, speculates, partial(is_posted, socket, RowIds(namespace).id_of([first])))
            yield batch

    return pass_on


def go_wrong(notes: Path, partition: int, speculates: bool, posted: Callable[[], bool]) -> None:  # noqa: FBT001
    if partition % 20 == FAILS:
        wait_until(posted)
        raise OSError("this task fails on purpose")
    if partition == KILLS:
        wait_until(posted)
        (notes / f"killed-{kill_others()}").touch()
    if partition == STRAGGLES and speculates:
        wait_until((notes / f"{partition}-1").exists)


def kill_others() -> int:
    """Kill every other Python worker of this executor, the one with the sink of this task among them.

    Workers are the grandchildren of the executor: one process for each environment forks them.
    """
    executor = parent_of(os.getppid())
    everybody = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    others = [pid for pid in everybody if pid != os.getpid() and parent_of(parent_of(pid)) == executor]
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    return len(others)


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def is_posted(socket: str | None, client_message_id: str) -> bool:
    try:
        with Client(socket) as client:
            client.get(client_message_id)
    except NotFound:
        return False
    return True


def wait_until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not so():
        if time.monotonic() > deadline:
            raise TimeoutError("what this task waits for has not happened")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--master", required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--partitions", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--speculation", action="store_true")
    parser.add_argument("options", nargs="+", metavar="NAME=VALUE")
    given = parser.parse_args()
    spark = (
        SparkSession.builder.master(given.master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.executor.memory", "1g")
        .config("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
        .config("spark.speculation", str(given.speculation).lower())
        .config("spark.speculation.interval", "200ms")
        .config("spark.speculation.quantile", "0.5")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    options = dict(option.split("=", 1) for option in given.options)
    spoil = rough(given.notes, options["namespace"], options.get("socket"), speculates=given.speculation)
    orders = spark.range(given.rows, numPartitions=given.partitions).selectExpr("id AS order_id", FILLER)
    orders.mapInArrow(spoil, COLUMNS).write.format("postroom").options(**options).mode("append").save()
    spark.stop()


if __name__ == "__main__":
    main()
