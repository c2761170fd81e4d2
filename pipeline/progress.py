"""The progress bar of a pipeline: how many of Spark's tasks are done, on standard error while it is a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PAUSE_SECONDS: Final = 0.2


class Tasks(NamedTuple):
    """How many tasks of the stages at work are done, of how many."""

    done: int
    all: int


def tasks(spark: SparkSession) -> Tasks:
    """Ask Spark how far its stages are."""
    tracker = spark.sparkContext.statusTracker()
    stages = [info for stage in tracker.getActiveStageIds() if (info := tracker.getStageInfo(stage))]
    return Tasks(sum(stage.numCompletedTasks for stage in stages), sum(stage.numTasks for stage in stages))


@contextmanager
def progress(spark: SparkSession, name: str) -> Iterator[None]:
    """Show how far Spark is while the block runs."""
    if not sys.stderr.isatty():
        yield
        return
    ended = threading.Event()
    watching = threading.Thread(target=_watch, args=(spark, name, ended), daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def _watch(spark: SparkSession, name: str, ended: threading.Event) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=None, state=_said(Tasks(0, 0)))
        while not ended.wait(_PAUSE_SECONDS):
            found = tasks(spark)
            bar.update(task, completed=found.done, total=found.all or None, state=_said(found))


def _said(found: Tasks) -> str:
    return f"{found.done} of {found.all} tasks" if found.all else "planning"
