"""Running one pipeline: its options, a Spark session, progress on a terminal, and the summary.

`postroom pipeline run` calls `run_by_name`; a module that was given to `spark-submit` calls `submitted`. Where a
session runs already it is used and left running.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.resources import as_file, files
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from pipeline.registry import Outcome, find, parse
from postroom._wire.words import counted
from postroom.chassis.exits import EXIT_OF, Exit, Fatal
from postroom.errors import PostroomError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_NO_SPARK: Final = "pipelines need Spark, which is not installed: pip install 'postroom-server[pipeline]'"
_PAUSE_SECONDS: Final = 0.2
_OURS: Final = re.compile(r"^postroom\.errors\.(\w+): (.+)$", re.MULTILINE)


def run_by_name(name: str, words: Sequence[str], *, shown: bool = True) -> Outcome:
    """Run a pipeline with the options `words`; on a terminal how far it is can be `shown`.

    Raises `Fatal`, and the errors of what it reads and writes.
    """
    pipeline = find(name)
    check_spark()
    options = parse(pipeline.options, words, name)
    with session(name) as spark, progress(spark, name) if shown else nullcontext(), own_sentences():
        return pipeline.run(spark, options)


def submitted(name: str) -> NoReturn:
    """Run a pipeline as the program of `spark-submit` and end the process with its exit code."""
    try:
        outcome = run_by_name(name, sys.argv[1:])
    except (Fatal, PostroomError) as error:
        sys.stderr.write(f"{name}: {error}\n")
        sys.exit(error.exit_code if isinstance(error, Fatal) else EXIT_OF.get(type(error).__name__, Exit.FAILED))
    for fact, value in outcome.facts.items():
        sys.stdout.write(f"{fact}: {value}\n")
    sys.exit(Exit.FAILED if outcome.failed else Exit.OK)


def check_spark() -> None:
    """Raise `Fatal` (69) where PySpark is not installed."""
    if importlib.util.find_spec("pyspark") is None:
        raise Fatal(Exit.UNAVAILABLE, _NO_SPARK)


@contextmanager
def session(name: str) -> Iterator[SparkSession]:
    """Lend the Spark session of this process, or one on all cores of this machine."""
    from pyspark import SparkConf  # noqa: PLC0415 - slow to import, and an extra
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415 - the same
    from pyspark.sql import SparkSession  # noqa: PLC0415 - the same

    from postroom.spark.session import prepare_environment, spare_workers_the_zip  # noqa: PLC0415 - the same

    present = None
    with suppress(PySparkRuntimeError):  # there is none
        present = SparkSession.active()
    if present is not None:
        yield present
        return
    prepare_environment()
    spare_workers_the_zip()
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")  # no pipeline uses pandas
    with as_file(files("pipeline").joinpath("log4j2.properties")) as quiet:
        builder = SparkSession.builder.appName(f"postroom {name}")
        always = {"spark.sql.session.timeZone": "UTC", "spark.ui.showConsoleProgress": "false"}
        own = {
            "spark.master": "local[*]",
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={quiet}",
            "spark.sql.shuffle.partitions": "8",
        }
        is_submitted = SparkConf().contains("spark.master")  # a session of `spark-submit` has its own settings
        for key, value in (always if is_submitted else always | own).items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        if threading.current_thread() is threading.main_thread():
            # Spark's own handler would talk to Java within the call that Ctrl-C interrupts, which cannot be
            signal.signal(signal.SIGINT, signal.default_int_handler)
            logging.getLogger().addFilter(_is_news)
            logging.getLogger("py4j").setLevel(logging.CRITICAL)
        try:
            yield spark
        except BaseException:
            with suppress(Exception):  # Java may be what ended
                spark.sparkContext.setLogLevel("OFF")  # tasks are cut off, and would say so at length
            raise
        finally:
            spark.stop()


def _is_news(record: logging.LogRecord) -> bool:
    """Leave out what the way to Java logs of an interruption with a traceback, since it raises it as well."""
    return record.getMessage() != "KeyboardInterrupt while sending command."


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
    return f"{found.done:,} of {counted(found.all, 'task')}" if found.all else "planning"


@contextmanager
def own_sentences() -> Iterator[None]:
    """Raise `Fatal` with our error's sentence and exit code where Spark raises one of its own around it."""
    from pyspark.errors import PySparkException  # noqa: PLC0415 - slow to import, and an extra

    try:
        yield
    except PySparkException as error:
        ours = _OURS.findall(str(error))
        if not ours:
            raise
        kind, sentence = ours[-1]
        raise Fatal(EXIT_OF.get(kind, Exit.FAILED), sentence) from error
