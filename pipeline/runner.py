"""Every pipeline by name, and running one: its options, a Spark session, progress on a terminal, and the summary.

Options are words `name=value`, for `postroom pipeline run` and `spark-submit` alike.

`postroom pipeline run` calls `run_by_name`; a module that was given to `spark-submit` calls `submitted`. A session that
runs already is used and left running.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from importlib.resources import as_file, files
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, NoReturn, TypeVar
from uuid import uuid4

import msgspec

from postroom._wire.words import counted
from postroom.chassis.exits import EXIT_OF, Exit, Fatal
from postroom.errors import PostroomError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

O = TypeVar("O", bound=msgspec.Struct)  # noqa: E741 - options

DATABASE_URL: Final = "POSTROOM_DATABASE_URL"
_NO_SPARK: Final = "pipelines need Spark, which is not installed: pip install 'postroom-server[pipeline]'"
_PAUSE_SECONDS: Final = 0.2
_UNFINISHED: Final = ".part-"  # the prefix of unfinished files
_ABANDONED_SECONDS: Final = 86_400  # since the last byte of one whose run was killed
_OURS: Final = re.compile(r"^postroom\.errors\.(\w+): (.+)$", re.MULTILINE)
_OF_SYSTEM: Final = re.compile(  # an OSError of a Python worker, or what Java's file systems raise
    r"^(?:\w+: \[Errno \d+\]|(?:Caused by|): (?:java\.io|java\.nio\.file|org\.apache\.hadoop\.fs)\.\w+:"
    r"|Caused by: java\.lang\.ClassNotFoundException:) (.+)$",
    re.MULTILINE,
)
_OF_DATA: Final = re.compile(  # Spark's errors about what it should read, and a pipeline's own
    r"\[(?:PATH_NOT_FOUND|FAILED_READ_FILE|MALFORMED_RECORD_IN_PARSING|UNABLE_TO_INFER_SCHEMA|USER_RAISED_EXCEPTION"
    r"|COLUMN_ALREADY_EXISTS|PARQUET_TYPE_\w+|UNSUPPORTED_TIME_TYPE|CANNOT_MERGE_SCHEMAS)"
    r"[.\w]*\] (.+?)(?:\s+SQLSTATE.*)?$",
    re.MULTILINE,
)
_CAUSE: Final = re.compile(r"^Caused by: [\w.$]+: (?:\[[.\w]+\] )?(.+?)(?:\s+SQLSTATE.*)?$", re.MULTILINE)
_OF_HEADER: Final = re.compile(r"CSV header does not conform to the schema\.\s+Header: (.+)(?:\n.*)+?\nCSV file: (.+)")
_OF_NAME: Final = re.compile(r"URISyntaxException: Relative path in absolute URI: \.?(.+?)(?:\.crc)?$", re.MULTILINE)


class Struct(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of every pipeline's options; a field without a default has to be given."""


class Database(Struct):
    """Options of a pipeline that reads the broker's database."""

    database_url: Annotated[str, msgspec.Meta(description="the broker's database [default: POSTROOM_DATABASE_URL]")] = (
        ""
    )


class History(Database):
    """Options of a pipeline that reads the history, or a part of it."""

    mesh: Annotated[str | None, msgspec.Meta(description="one mesh [default: all]")] = None
    since: Annotated[str | None, msgspec.Meta(description="a day or time: what was accepted from then on")] = None
    until: Annotated[str | None, msgspec.Meta(description="a day or time: what was accepted before it")] = None


def parse(options: type[O], words: Iterable[str], name: str) -> O:
    """Read the words of one pipeline; raises `Fatal` (2) with the wrong one and the known options."""
    given: dict[str, str] = {}
    for word in words:
        key, separator, value = word.partition("=")
        key = key.replace("-", "_")
        if not separator:
            _refuse(name, options, f"{word!r} is not an option of the form name=value")
        if key in given:
            _refuse(name, options, f"{key} is given twice: give it once")
        if not value.strip() and key != "database_url":  # as of a variable that is not set
            _refuse(name, options, f"{key} is empty")
        given[key] = value
    if DATABASE_URL in os.environ and "database_url" in options.__struct_fields__:
        given.setdefault("database_url", os.environ[DATABASE_URL])
    try:
        found = msgspec.convert(given, options, strict=False)
    except msgspec.ValidationError as error:
        said = str(error)
        if key := said.removesuffix("`").partition(" - at `$.")[2]:
            _refuse(name, options, f"{key} is {given[key]!r}: give {_expected(options, key)}")
        said = said.replace("Object missing required field", "it needs the option")
        _refuse(name, options, said.replace("Object contains unknown field", "there is no option"))
    if isinstance(found, Database) and not found.database_url:
        raise Fatal(Exit.USAGE, f"say which database to read: set {DATABASE_URL}, or add database_url=postgresql://…")
    return found


def _expected(options: type[msgspec.Struct], name: str) -> str:
    """Return what an option that is more than text may be."""
    match _schema(options)["properties"][name]:
        case {"type": "boolean"}:
            return "true or false"
        case {"type": "integer", "minimum": least, "maximum": most}:
            return f"a whole number from {least} to {most}"
        case {"type": "number", "exclusiveMinimum": bound, "maximum": most}:
            return f"a number of more than {bound}, at most {most}"
        case {"anyOf": [{"enum": [*words, last]}, {"type": "null"}]}:
            return f"{', '.join(words)} or {last}"
        case other:
            raise TypeError(f"{name}: no words for {other}")


def _schema(options: type[msgspec.Struct]) -> dict[str, Any]:
    schema: dict[str, Any] = msgspec.json.schema(options)["$defs"][options.__name__]
    return schema


def described(options: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """Return each option with its description, and its default if it has one."""
    known = _schema(options)
    required = known.get("required", ())
    return {
        name: {
            "description": field.get("description", ""),
            "required": name in required,
            "default": field.get("default"),
        }
        for name, field in known["properties"].items()
    }


def moment(text: str | None, option: str) -> datetime | None:
    """Read a day or time of ISO 8601, in UTC where it has no zone; raises `Fatal` (2)."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (OverflowError, ValueError) as error:
        raise Fatal(Exit.USAGE, f"{option} is {text!r}: use a day or a time, such as 2026-11-01") from error


def local_directory(output: str) -> Path:
    """Return the directory that `output` names; raises `Fatal` (2) for a URI, which would be a directory `s3a:`."""
    if ":/" in output:
        raise Fatal(Exit.USAGE, f"output is {output!r}: give the path of a directory, such as of a mounted file system")
    return Path(output)


def sweep(directory: Path) -> None:
    """Remove the drafts of killed runs from a directory, but not those of running ones."""
    for file in directory.glob(f"{_UNFINISHED}*"):
        with suppress(FileNotFoundError):  # another task sweeps as well
            if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS:
                file.unlink()


@contextmanager
def draft(directory: Path) -> Iterator[Path]:
    """Lend a file of this run's own to write to; what has no other name at the end is removed."""
    fresh = directory / f"{_UNFINISHED}{uuid4()}"
    fresh.touch(exist_ok=False)  # for whom the umask says: a report is for more people than its author
    try:
        yield fresh
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def replacement(file: Path) -> Iterator[Path]:
    """Lend a draft that takes the place of `file` at the end: until then, and where it fails, the one before stays."""
    with draft(file.parent) as fresh:
        yield fresh
        fresh.replace(file)


def _refuse(name: str, options: type[msgspec.Struct], why: str) -> Any:
    known = ", ".join(options.__struct_fields__)
    raise Fatal(Exit.USAGE, f"{name}: {why}; its options are {known} (`postroom pipeline list` describes them)")


class Pipeline(NamedTuple):
    """A pipeline: its module has `Options`, a struct, and `run(spark, options)`, which returns an `Outcome`."""

    name: str
    reads: str
    summary: str

    @property
    def module(self) -> Any:
        """Its module, imported."""
        return importlib.import_module(f"pipeline.{self.name.replace('-', '_')}")

    @property
    def options(self) -> type[msgspec.Struct]:
        """Its options."""
        options: type[msgspec.Struct] = self.module.Options
        return options


class Outcome(NamedTuple):
    """The result of a run; `failed` where it found something wrong."""

    facts: Mapping[str, Any]
    failed: bool = False


PIPELINES: Final[Mapping[str, Pipeline]] = MappingProxyType(
    {
        pipeline.name: pipeline
        for pipeline in (
            Pipeline("orphan-check", "the broker's tables", "Check that every accepted message has all its rows."),
            Pipeline("rate-telemetry", "the history", "Count what each member sent in each window of the limiter."),
            Pipeline("audit-log", "the history, exports of outboxes", "Append each day that is over to Parquet."),
            Pipeline("search-index", "messages", "Fill the full-text index."),
            Pipeline("state-hash", "event stores of agents", "Recompute each agent's chain of hashes."),
            Pipeline("backfill", "Parquet, CSV or JSON", "Send every row through the daemon."),
            Pipeline("delivery-report", "the history, deliveries", "Plot how long deliveries take, by topic and day."),
        )
    }
)


def run_by_name(name: str, words: Sequence[str], *, shown: bool = True) -> Outcome:
    """Run a pipeline with the options `words`; a terminal shows its progress where that is `shown`.

    Raises `Fatal`, 3 for an unknown one, and the errors of what it reads and writes.
    """
    if (pipeline := PIPELINES.get(name)) is None:
        raise Fatal(Exit.NOT_FOUND, f"there is no pipeline {name!r}: choose one of {', '.join(PIPELINES)}")
    check_spark()
    options = parse(pipeline.options, words, name)
    with session(name) as spark, progress(spark, name) if shown else nullcontext(), own_sentences():
        outcome: Outcome = pipeline.module.run(spark, options)
        return outcome


def submitted(name: str) -> NoReturn:
    """Run a pipeline as the program of `spark-submit` and end the process with its exit code."""
    try:
        outcome = run_by_name(name, sys.argv[1:])
    except (Fatal, PostroomError) as error:
        code = error.exit_code if isinstance(error, Fatal) else EXIT_OF.get(type(error).__name__, Exit.FAILED)
        sys.exit(Fatal(code, str(error)).report(name))
    for fact, value in outcome.facts.items():
        sys.stdout.write(f"{fact}: {value}\n")
    sys.exit(Exit.FAILED if outcome.failed else Exit.OK)


def check_spark() -> None:
    """Raise `Fatal` (69) where PySpark is not installed."""
    if importlib.util.find_spec("pyspark") is None:
        raise Fatal(Exit.UNAVAILABLE, _NO_SPARK)


@contextmanager
def session(name: str) -> Iterator[SparkSession]:
    """Lend the Spark session of this process, or start one on all cores of this machine."""
    from pyspark import SparkConf  # noqa: PLC0415 - slow to import, and an extra
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415 - the same
    from pyspark.sql import SparkSession  # noqa: PLC0415 - the same

    from postroom.spark.session import prepare_environment  # noqa: PLC0415 - the same

    present = None
    with suppress(PySparkRuntimeError):  # there is none
        present = SparkSession.active()
    if present is not None:
        yield present
        return
    prepare_environment()
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas")  # no pipeline uses pandas
    with as_file(files("pipeline").joinpath("log4j2.properties")) as quiet:
        builder = SparkSession.builder.appName(f"postroom {name}")
        always = {
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.caseSensitive": "true",  # JSON may have both `a` and `A`
            "spark.ui.showConsoleProgress": "false",
        }
        own = {
            "spark.master": "local[*]",
            "spark.ui.enabled": "false",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={quiet.as_uri()}",
            "spark.sql.shuffle.partitions": "8",
        }
        is_submitted = SparkConf().contains("spark.master")  # a session of `spark-submit` has its own settings
        for key, value in (always if is_submitted else always | own).items():
            builder = builder.config(key, value)
        # Ctrl-C waits until Java runs: PySpark would leave it behind, without the file that tells where it listens
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            spark = builder.getOrCreate()
            if threading.current_thread() is threading.main_thread():
                # Spark's own handler would call Java during the call that Ctrl-C interrupts, which is not possible
                signal.signal(signal.SIGINT, signal.default_int_handler)
                # py4j logs the traceback of an interruption, and raises it as well
                interrupted = "KeyboardInterrupt while sending command."
                logging.getLogger().addFilter(lambda record: record.getMessage() != interrupted)
                logging.getLogger("py4j").setLevel(logging.CRITICAL)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        try:
            yield spark
        except BaseException:
            with suppress(Exception):  # Java itself may have ended
                spark.sparkContext.setLogLevel("OFF")  # tasks are interrupted, and would log that at length
            raise
        finally:
            spark.stop()


@contextmanager
def progress(spark: SparkSession, name: str) -> Iterator[None]:
    """Show how far Spark is while the block runs: how many tasks of the active stages are done, of how many."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    ended = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn())

    def watch() -> None:
        tracker = spark.sparkContext.statusTracker()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(name, total=None, state="planning")
            while not ended.wait(_PAUSE_SECONDS):
                stages = [info for stage in tracker.getActiveStageIds() if (info := tracker.getStageInfo(stage))]
                done, total = sum(one.numCompletedTasks for one in stages), sum(one.numTasks for one in stages)
                state = f"{done:,} of {counted(total, 'task')}" if total else "planning"
                bar.update(task, completed=done, total=total or None, state=state)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


@contextmanager
def own_sentences() -> Iterator[None]:
    """Raise `Fatal` with one sentence and its exit code where Spark raises an error around one that is none of its own.

    That is an error of ours, or one of the system, as for a full disk, or data that Spark cannot read. An error of the
    system in this process is one too.
    """
    from py4j.protocol import Py4JError  # noqa: PLC0415 - slow to import, and an extra
    from pyspark.errors import PySparkException  # noqa: PLC0415 - the same

    try:
        yield
    except (PySparkException, Py4JError) as error:
        if ours := _OURS.findall(str(error)):
            kind, sentence = ours[-1]
            raise Fatal(EXIT_OF.get(kind, Exit.FAILED), sentence) from error
        if found := _OF_NAME.findall(str(error)):
            detail = f"Spark reads no file with a colon in its name: rename {found[0]}, or move it elsewhere"
            raise Fatal(Exit.IO_ERROR, detail) from error
        if found := _OF_HEADER.findall(str(error)):
            header, file = found[0]
            detail = (
                f"the header of {file} must have each name once, as those of all files in one order: it is {header}"
            )
            raise Fatal(Exit.IO_ERROR, detail) from error
        if found := _OF_DATA.findall(str(error)):
            why = _CAUSE.findall(str(error))[-1:]
            raise Fatal(Exit.IO_ERROR, " ".join([found[0], *why])) from error
        if found := _OF_SYSTEM.findall(str(error)):
            raise Fatal(Exit.IO_ERROR, found[-1]) from error
        raise
    except OSError as error:
        said = error.strerror or str(error)
        raise Fatal(Exit.IO_ERROR, f"{error.filename}: {said}" if error.filename else said) from error
