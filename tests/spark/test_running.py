"""`postroom pipeline`: its words, and the pipelines over files (docs/contract/spark.md#spark-19)."""

from __future__ import annotations

import asyncio
import csv
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession
from support.agents import opened
from support.histories import History
from support.jetstream import Context
from support.post import PostOffice
from support.rough_write import wait_until

from pipeline.runner import PIPELINES, described, draft, moment, parse, run_by_name, submitted
from postroom.chassis.exits import Exit, Fatal
from postroom.claims import Outcome
from postroom.delivery.message import Delivery
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings
from postroom.spark.session import provide_java

START = datetime(2026, 11, 21, tzinfo=UTC)
ROOT = Path(__file__).parents[2]


def postroom(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli", "pipeline", *words]
    return subprocess.run(
        command, env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_every_pipeline_describes_each_of_its_options() -> None:
    for pipeline in PIPELINES.values():
        options = described(pipeline.options)
        assert options.keys() == set(pipeline.options.__struct_fields__)
        assert all(option["description"] for option in options.values()), pipeline.name


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["mesh"], "not an option of the form name=value"),
        (["output=x", "output=y"], "output is given twice"),
        (["database-url=x", "database_url=y"], "database_url is given twice"),
        (["colour=red", "output=x"], "there is no option `colour`"),
        ([], "it needs the option `output`"),
        (["output="], "output is empty"),
        (["output=x", "database_url="], "say which database"),
    ],
)
def test_words_that_are_no_options_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(Fatal, match=sentence) as raised:
        parse(PIPELINES["delivery-report"].options, words, "delivery-report")
    assert raised.value.exit_code == Exit.USAGE


@pytest.mark.parametrize(
    ("name", "words", "sentence"),
    [
        ("audit-log", ["output=x", "verify=yes"], "verify is 'yes': give true or false"),
        ("rate-telemetry", ["window_seconds=1.5"], "window_seconds is '1.5': give a whole number from 1 to 86400"),
        ("orphan-check", ["events_kept_days=-1"], "events_kept_days is '-1': give a number of more than 0"),
        ("backfill", ["id=a", "input=x", "format=xml"], "format is 'xml': give csv, json or parquet"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_what_to_give(name: str, words: list[str], sentence: str) -> None:
    database = [] if name == "backfill" else ["database_url=x"]
    with pytest.raises(Fatal, match=sentence):
        parse(PIPELINES[name].options, [*words, *database], name)


@pytest.mark.parametrize("days", ["0", "nan", "inf", "1e9"])
def test_a_time_that_no_event_is_kept_for_is_refused(days: str) -> None:
    with pytest.raises(Fatal, match="events_kept_days"):
        parse(PIPELINES["orphan-check"].options, ["database_url=x", f"events_kept_days={days}"], "orphan-check")


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "0001-01-01T00:00:00+23:59"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Fatal, match="since is") as raised:
        moment(text, "since")
    assert raised.value.exit_code == Exit.USAGE


def test_the_command_says_what_there_is_and_what_is_missing(tmp_path: Path) -> None:
    unknown = postroom("run", "nonsense")
    assert unknown.returncode == Exit.NOT_FOUND
    assert "orphan-check" in unknown.stderr
    hidden = tmp_path / "sitecustomize.py"
    hidden.write_text("import sys\nsys.modules['pyspark'] = None\n")
    without = postroom("run", "orphan-check", PYTHONPATH=str(tmp_path))
    assert without.returncode == Exit.UNAVAILABLE
    assert "pip install 'postroom-server[pipeline]'" in without.stderr
    assert "Traceback" not in without.stderr


@pytest.fixture
async def context(nats_url: str) -> AsyncIterator[Context]:
    """A context whose four default streams exist."""
    connection = await connect(NatsSettings(url=nats_url), name="test", patience=20)
    context = Context(connection)
    await context.declare()
    yield context
    await context.remove()
    await connection.close()


def options(**values: Any) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]


async def test_state_hash_gives_the_runtimes_hash_and_finds_an_altered_store(
    context: Context, spark: SparkSession, tmp_path: Path
) -> None:
    del spark
    state_hash = await handled(context, tmp_path / "sound")
    await handled(context, tmp_path / "altered")
    words = options(stores=tmp_path / "*/events.db", output=tmp_path / "found")
    sound = await asyncio.to_thread(run_by_name, "state-hash", words)
    file = tmp_path / "altered/events.db"
    file.write_bytes(file.read_bytes().replace(b'"id":"order-2"', b'"id":"Order-2"'))
    (tmp_path / "found/notes").write_text("of somebody else")
    altered = await asyncio.to_thread(run_by_name, "state-hash", words)

    assert sound == (dict.fromkeys(sound.facts, f"counting {state_hash} at 9"), False)
    assert altered.failed
    assert altered.facts[str(tmp_path / "sound/events.db")] == f"counting {state_hash} at 9"
    assert "position 4" in altered.facts[str(file)]
    written = tmp_path / "found/state-hash.parquet"
    before = written.read_bytes()
    assert [line["why"] is None for line in parquet.read_table(written).to_pylist()] == [False, True]
    file.write_bytes(b"no longer a store")

    def full(_table: pa.Table, fresh: Path) -> None:
        fresh.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device", str(fresh))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "write_table", full)
        with pytest.raises(Fatal, match="No space left on device"):
            await asyncio.to_thread(run_by_name, "state-hash", words)
    assert {entry.name for entry in (tmp_path / "found").iterdir()} == {"notes", "state-hash.parquet"}
    assert written.read_bytes() == before
    unreadable = await asyncio.to_thread(run_by_name, "state-hash", words)
    assert unreadable.failed
    assert unreadable.facts == sound.facts | {str(file): f"cannot read {file}: file is not a database"}


async def handled(context: Context, directory: Path) -> str:
    """Let an agent with a store of its own handle three orders; return its state hash."""
    runtime = await opened(context, directory)
    orders = [
        Delivery(
            context.subject, b'{"total":%d}' % number, {}, f"order-{number}", context.events, number, 1,
            published_at=START,
        )
        for number in range(1, 4)
    ]  # fmt: skip

    async def settle(_delivery: Delivery, _outcome: Outcome) -> None:
        """The stream is not asked."""

    running = asyncio.create_task(runtime.run())
    await runtime.handle(orders, settle)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    state_hash = runtime.state_hash
    await runtime.close()
    return state_hash


def test_a_backfill_that_runs_twice_sends_each_row_once(spark: SparkSession, post: PostOffice, tmp_path: Path) -> None:
    del spark
    file = tmp_path / "orders.csv"
    file.write_text("order_id,what\n" + "".join(f"{number},apples\n" for number in range(40)))
    words = options(input=file, id="order_id", to="topic:orders", socket=post.socket, namespace=post.namespace)
    assert run_by_name("backfill", words).facts["rows"] == 40
    run_by_name("backfill", words)

    assert len(post.accepted()) == 40


def test_a_backfill_reads_csv_as_other_programs_write_it(spark: SparkSession, post: PostOffice, tmp_path: Path) -> None:
    del spark
    values = ['a "b" c', '"', '\\"', "ends\\", "two, with\nlines, and more", "é,;"]
    with (tmp_path / "notes.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("note_id", "text"), *enumerate(values)])
    words = options(input=tmp_path / "notes.csv", id="note_id", body="text", to="topic:orders", socket=post.socket)
    run_by_name("backfill", [*words, f"namespace={post.namespace}"])

    sent = {key: message.body.decode() for key, message in post.accepted().items()}
    assert sent == {str(number): value for number, value in enumerate(values)}


def test_a_backfill_takes_the_index_that_pandas_writes_without_a_name(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    (tmp_path / "orders.csv").write_text(",order_id,what\n0,17,apples\n")
    words = options(input=tmp_path / "orders.csv", id="order_id", to="topic:orders", socket=post.socket)
    run_by_name("backfill", [*words, f"namespace={post.namespace}"])
    assert json.loads(post.accepted()["17"].body) == {"_c0": "0", "order_id": "17", "what": "apples"}
    del spark


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("orders.csv", "order_id,_corrupt_record,what\n17,kept,apples\n"),
        ("orders.json", '{"order_id": "17", "_corrupt_record": "kept", "what": "apples"}\n'),
    ],
)
def test_a_backfill_sends_a_column_that_has_spark_s_name_for_damaged_records(
    spark: SparkSession, post: PostOffice, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    words = options(input=tmp_path / name, id="order_id", to="topic:orders", socket=post.socket)
    run_by_name("backfill", [*words, f"namespace={post.namespace}"])
    assert post.accepted()["17"].json == {"order_id": "17", "_corrupt_record": "kept", "what": "apples"}
    del spark


def test_a_backfill_of_a_directory_sends_what_its_own_files_hold_and_null_for_an_empty_field(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    for name, number in (("orders.csv", 17), ("_orders.csv", 18), (".orders.csv", 19), ("more/orders.csv", 20)):
        (tmp_path / name).write_text(f'order_id,what,note\n{number},,""\n')
    words = options(input=tmp_path, format="csv", id="order_id", to="topic:orders", socket=post.socket)
    run_by_name("backfill", [*words, f"namespace={post.namespace}"])
    (message,) = post.accepted().values()
    assert message.json == {"order_id": "17", "what": None, "note": None}
    del spark


def test_a_backfill_sends_the_columns_of_every_parquet_file(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    """Spark by itself takes those of one file, and drops what others have more."""
    for number, more in enumerate(({}, {"note": ["salmon"]}, {})):
        parquet.write_table(pa.table({"order_id": [number], **more}), tmp_path / f"{number}.parquet")
    words = options(input=tmp_path, id="order_id", to="topic:orders", socket=post.socket, namespace=post.namespace)
    run_by_name("backfill", words)
    assert [message.json.get("note") for _, message in sorted(post.accepted().items())] == [None, "salmon", None]
    del spark


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nanoseconds.parquet", r"Illegal Parquet type: INT64 \(TIMESTAMP\(NANOS,false\)\)"),
        ("other.parquet", "Failed merging schema"),
        ("damaged.json", "Malformed records are detected"),
        ("damaged.csv", "error while reading file .*damaged.csv.*Malformed CSV record: 2,pears,plums"),
        ("twice.csv", "the header of .*twice.csv must have each name once, .*: it is order_id, what, what"),
        ("orders.csv", "the header of .*[ab].csv must have .* in one order: it is (order_id, what|what, order_id)"),
        ("damaged.parquet", "error while reading file .*damaged.parquet"),
        ("directory", "no ending that .* read as Parquet, which file:.*directory/a is not: give format=csv or format="),
        ("twice.json", "The column `a` already exists"),
        ("missing.json", "Path does not exist: file:.*missing.json"),
        ("noon 12:00.csv", "a colon in its name: rename noon 12:00.csv"),
    ],
)
@pytest.mark.usefixtures("spark")
def test_a_backfill_of_data_that_cannot_be_read_says_why(
    post: PostOffice, tmp_path: Path, name: str, sentence: str
) -> None:
    (tmp_path / "damaged.json").write_text('{"order_id":1}\n{"order_id":2\n')
    (tmp_path / "twice.json").write_text('{"order_id":1,"A":1,"a":2}\n')
    (tmp_path / "twice.csv").write_text("order_id,what,what\n1,apples,pears\n")
    (tmp_path / "orders.csv").mkdir()
    (tmp_path / "orders.csv" / "a.csv").write_text("order_id,what\n" + "1,apples\n" * 1000)
    (tmp_path / "orders.csv" / "b.csv").write_text("what,order_id\n")
    (tmp_path / "directory").mkdir()
    (tmp_path / "directory" / "a").write_text("order_id,what\n1,apples\n")
    times = pa.array([0], pa.timestamp("ns"))
    parquet.write_table(pa.table({"order_id": [1], "at": times}), tmp_path / "nanoseconds.parquet")
    (tmp_path / "other.parquet").mkdir()
    for number, value in enumerate((1, "a")):
        parquet.write_table(pa.table({"order_id": [value]}), tmp_path / "other.parquet" / f"{number}.parquet")
    for damaged in ("damaged.csv", "damaged.parquet", "noon 12:00.csv"):
        (tmp_path / damaged).write_text("order_id,what\n1,apples\n2,pears,plums\n")
    words = options(input=tmp_path / name, id="order_id", to="topic:orders", socket=post.socket)
    with pytest.raises(Fatal, match=f"^[^\\n]*{sentence}[^\\n]*$") as raised:
        run_by_name("backfill", [*words, f"namespace={post.namespace}"])
    assert raised.value.exit_code == Exit.IO_ERROR
    assert post.accepted() == {}


def test_a_pipeline_whose_task_fails_prints_no_stack_of_java(quick_java: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "damaged.json").write_text('{"order_id":1}\n{"order_id":2\n')
    words = options(input=tmp_path / "damaged.json", id="order_id", to="topic:orders")
    failed = postroom("run", "backfill", *words, **quick_java, XDG_CACHE_HOME=str(tmp_path))
    assert failed.returncode == Exit.IO_ERROR
    assert failed.stderr.splitlines()[-1].startswith("postroom: Malformed records")
    assert "Exception" not in failed.stderr


def test_a_backfill_puts_the_rows_that_are_refused_into_a_directory(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    del spark
    data, refused = tmp_path / "orders.csv", tmp_path / "refused"
    data.mkdir()
    (data / "part-0.csv").write_text("order_id,urgency\n1,low\n2,soon\n")
    words = options(input=f"{data}/", id="order_id", priority="urgency", to="topic:orders", on_refused=refused)
    run_by_name("backfill", words + options(socket=post.socket, namespace=post.namespace))

    assert post.accepted().keys() == {"1"}
    (file,) = refused.iterdir()
    assert '"order_id":"2"' in file.read_text()


@pytest.mark.usefixtures("spark")
def test_what_a_pipeline_cannot_reach_through_spark_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "events.db").touch()
    with pytest.raises(Fatal, match=r"^.*events\.db: (File exists|Not a directory)") as unwritable:
        run_by_name("state-hash", options(stores=tmp_path / "events.db", output=tmp_path / "events.db"))
    with pytest.raises(Fatal, match=r"^Class org.*\.S3AFileSystem not found$") as unknown:
        run_by_name("backfill", options(input="s3a://bucket/orders.csv", id="order_id", to="topic:orders"))
    assert unwritable.value.exit_code == unknown.value.exit_code == Exit.IO_ERROR


def test_no_store_is_an_error(spark: SparkSession, tmp_path: Path) -> None:
    del spark
    with pytest.raises(Fatal, match="no event store matches"):
        run_by_name("state-hash", options(stores=tmp_path / "*.db"))


def test_a_submitted_pipeline_ends_with_the_exit_code_of_the_command(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del spark
    monkeypatch.setattr(sys, "argv", ["rate_telemetry.py", "database_url=postgresql://nobody@127.0.0.1:1/none"])
    with pytest.raises(SystemExit) as ended:
        submitted("rate-telemetry")
    assert ended.value.code == Exit.UNAVAILABLE
    assert capsys.readouterr().err.startswith("rate-telemetry: cannot open the database")


def test_a_submitted_pipeline_says_what_the_system_refused(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    del spark
    output = tmp_path / "file" / "report"
    output.parent.touch()
    monkeypatch.setattr(sys, "argv", ["delivery_report.py", "database_url=postgresql:///none", f"output={output}"])
    with pytest.raises(SystemExit) as ended:
        submitted("delivery-report")
    assert ended.value.code == Exit.IO_ERROR
    assert capsys.readouterr().err == f"delivery-report: {output}: Not a directory\n"


def test_what_spark_raises_around_an_error_of_ours_is_said_in_our_sentence(
    spark: SparkSession, database_url: str
) -> None:
    del spark
    History(database_url).accept(["id-1"])
    with pytest.raises(Fatal, match=r"^there is no mesh 'nope': `postroom mesh list` shows them$") as raised:
        run_by_name("rate-telemetry", options(database_url=database_url, mesh="nope"))
    assert raised.value.exit_code == Exit.NOT_FOUND


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_what_a_pipeline_writes_is_for_whom_the_umask_says(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with draft(tmp_path) as fresh:
            assert fresh.stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_java_starts_ends_java_too(quick_java: dict[str, str], tmp_path: Path) -> None:
    environment = {**os.environ, **quick_java, "XDG_CACHE_HOME": str(tmp_path)}
    environment["POSTROOM_DATABASE_URL"] = "postgresql://nobody@127.0.0.1:1/none"
    command = [sys.executable, "-m", "cli", "pipeline", "run", "rate-telemetry"]
    with subprocess.Popen(
        command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            wait_until(lambda: b"pyspark-shell" in commands_of_children(process.pid) or process.poll() is not None)
            os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=120)  # Java holds its end of the pipe as long as it lives
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert output.decode().splitlines()[-1] == "postroom: interrupted"
    assert "Exception" not in output.decode()


def commands_of_children(pid: int) -> bytes:
    """Return the command lines of a process's children; none where it has ended."""
    found = b""
    with suppress(FileNotFoundError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += Path(f"/proc/{child}/cmdline").read_bytes()
    return found


@pytest.mark.soak
def test_the_module_of_a_pipeline_runs_under_spark_submit(database_url: str, tmp_path: Path) -> None:
    History(database_url).accept(f"id-{number}" for number in range(12))
    environment = {**os.environ, "POSTROOM_DATABASE_URL": database_url, "XDG_CACHE_HOME": str(tmp_path)}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    provide_java(environment)

    def submit(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["spark-submit", "--master", "local[2]", str(ROOT / "pipeline/rate_telemetry.py"), *words]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = [submit(), submit()]
    assert [run.returncode for run in done] == [Exit.OK, Exit.OK], done[0].stderr
    assert done[0].stdout == done[1].stdout
    assert "messages: 12" in done[0].stdout
    refused = submit("colour=red")
    assert refused.returncode == Exit.USAGE
    assert "rate-telemetry: " in refused.stdout  # where spark-submit puts what its program says on either
    assert "Traceback" not in refused.stdout


@pytest.mark.soak
def test_a_pipeline_runs_where_the_path_of_its_package_has_a_space(
    quick_java: dict[str, str], database_url: str, tmp_path: Path
) -> None:
    History(database_url).accept(["id-1"])
    place = tmp_path / "a room"
    shutil.copytree(ROOT / "pipeline", place / "pipeline")
    environment = {**os.environ, **quick_java, "POSTROOM_DATABASE_URL": database_url, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pipeline.rate_telemetry"]
    done = subprocess.run(command, env=environment, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == Exit.OK, done.stdout + done.stderr
    assert "messages: 1" in done.stdout
