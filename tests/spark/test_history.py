"""The source `postroom_history`: every column, whatever is asked for, and each message once in a stream."""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import msgspec
import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import EqualTo, GreaterThan, LessThanOrEqual
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StringType, StructType
from support.databases import back_up, forget, restore
from support.histories import History, run

from embedded import EmbeddedPostgres
from postroom import Conflict, Gone
from postroom._wire.administration import HistoryMessage
from postroom.errors import InvalidMessage, NotPermitted, PostroomError, Unavailable
from postroom.spark.database import connect
from postroom.spark.history import (
    _SETTINGS,
    ABSENT_SECONDS,
    QUERIES,
    SCHEMA,
    HistoryReader,
    PushingHistoryReader,
    copy,
    fetch,
)
from postroom.spark.history_options import Conditions, read_options
from postroom.spark.history_stream import HistoryStreamReader


@pytest.fixture
def history(database_url: str) -> History:
    return History(database_url)


def load(spark: SparkSession, history: History, **options: Any) -> DataFrame:
    options = {"database_url": history.url, "partition_rows": 10, **options}
    return spark.read.format("postroom_history").options(**options).load()


def ids(frame: DataFrame) -> list[str]:
    return sorted(row["client_message_id"] for row in frame.select("client_message_id").collect())


def test_a_batch_holds_every_message_with_every_field(spark: SparkSession, history: History) -> None:
    history.accept((f"id-{number:02}" for number in range(25)), mentions=["bob"], reply_to="id-00")
    history.accept(["odd"], "dm:bob", body='a "quoted",\nbroken\\N line', meta={"k": "v"}, priority="now")
    history.accept(["empty"], "queue:work", body="")
    history.accept(["bytes"], body=None, body_base64="AAECgP8=")
    rows = {row["client_message_id"]: row for row in load(spark, history).collect()}

    assert len(rows) == 28
    assert set(HistoryMessage.__struct_fields__) == set(SCHEMA.fieldNames())
    odd = rows["odd"]
    assert (odd["to"], odd["sender"], odd["mesh"], odd["priority"]) == ("dm:bob", "alice", "demo", "now")
    assert odd["body"] == 'a "quoted",\nbroken\\N line'
    assert msgspec.json.decode(odd["meta"]) == {"k": "v"}
    assert rows["id-07"]["reply_to"] == "id-00"
    assert (rows["empty"]["body"], rows["empty"]["body_base64"]) == ("", None)
    assert (rows["bytes"]["body"], rows["bytes"]["body_base64"]) == (None, "AAECgP8=")
    (kept,) = history.fetch("SELECT * FROM mesh.message WHERE client_message_id = 'odd'")
    assert odd["request_fingerprint"] == kept["request_fingerprint"].hex()
    assert odd["accepted_at"].astimezone(kept["accepted_at"].tzinfo) == kept["accepted_at"]


ODD_BODIES = [
    "\ufeffmarked",  # the first row of a block
    "",
    '"',
    "\x1e",
    "a\x1fb",
    "\\.",
    "\\N",
    "two\nlines\r\n",
    "\n",
    " ",
    "t",
    "NULL",
    "x" * 1_000_000,
    "Lachs für den Käptn",
]


def test_a_column_alone_holds_nulls_empty_texts_and_whatever_a_text_may_hold(history: History) -> None:
    bodies: list[str | None] = [*ODD_BODIES, None]
    for number, body in enumerate(bodies):
        history.accept([f"odd-{number}"], body=body, body_base64="AAEC" if body is None else None)
    options = read_options({"database_url": history.url}, streaming=False)
    reader = HistoryReader(options, StructType().add("body", StringType()))
    read = [body for part in reader.partitions() for batch in reader.read(part) for body in batch["body"].to_pylist()]

    assert sorted(read, key=repr) == sorted(bodies, key=repr)


LINES = pa.schema([("line", pa.string())])


def test_a_read_that_stops_half_way_ends_its_query(history: History) -> None:
    history.accept(f"id-{number}" for number in range(6))
    endless = "SELECT repeat('x', 1000) AS line FROM (SELECT generate_series(1, 1000000000)) AS number"
    rows = copy(history.url, endless, [], LINES)
    assert next(rows)["line"][0].as_py() == "x" * 1000
    rows.close()

    running = (
        "SELECT FROM pg_stat_activity WHERE state = 'active' AND query LIKE '%1000000000%' AND pid <> pg_backend_pid()"
    )
    assert history.fetch(running) == []


def test_a_read_that_the_database_ends_or_refuses_says_why(history: History) -> None:
    ended = copy(history.url, "SELECT pg_terminate_backend(pg_backend_pid())::text AS line", [], LINES)
    with pytest.raises(Unavailable, match=r"the database has ended the connection or the statement: .*terminat"):
        next(ended)
    with pytest.raises(PostroomError, match="the database refused: division by zero"):
        next(copy(history.url, "SELECT (1 / 0)::text AS line", [], LINES))
    address, _, options = history.url.partition("?")
    for wrong in (address + "_of_another", address.replace("://postroom@", "://nobody@")):  # it is not waited for
        with pytest.raises(NotPermitted, match=r"the database refused the login: .*(does not exist|failed)"):
            fetch(f"{wrong}?{options}", "SELECT 1", seconds=ABSENT_SECONDS)
    history.execute("DROP SCHEMA mesh CASCADE")
    with pytest.raises(PostroomError, match=r"not the broker's database, or .*: name the broker's in database_url"):
        HistoryReader(read_options({"database_url": history.url}, streaming=False), SCHEMA).partitions()


def test_options_and_columns_narrow_what_is_read(spark: SparkSession, history: History) -> None:
    history.add_mesh("sea")
    history.accept(["ours"])
    history.accept(["theirs"], mesh="sea")
    history.tamper("UPDATE mesh.message_history SET accepted_at = '2026-11-01' WHERE client_message_id = 'ours'")

    assert ids(load(spark, history)) == ["ours", "theirs"]
    assert ids(load(spark, history, mesh="sea")) == ["theirs"]
    history.accept(["letter"], "dm:bob")
    assert ids(load(spark, history, to="dm:bob")) == ["letter"]
    history.tamper("DELETE FROM mesh.message_history WHERE client_message_id = 'letter'")
    assert ids(load(spark, history, since="2026-11-01", until="2026-11-01T00:00:00.000001")) == ["ours"]
    assert ids(load(spark, history, until="2026-11-01")) == ids(load(spark, history, until="0001-01-01")) == []
    reader = spark.read.format("postroom_history").option("database_url", history.url)
    narrow = reader.schema("mesh STRING, history_id BIGINT").load()
    assert sorted(map(tuple, narrow.collect())) == [("demo", 1), ("sea", 1)]


def test_a_data_frame_whose_filters_were_pushed_is_whole_without_them(spark: SparkSession, history: History) -> None:
    history.accept(f"id-{number}" for number in range(12))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = load(spark, history)
        assert ids(frame.where("history_id = 3")) == ["id-2"]
        assert frame.count() == 12
        pushed = load(spark, history, push_filters="true").where("history_id > 11 AND sender = 'alice'")
        assert ids(pushed) == ["id-11"]
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_pushed_filters_leave_out_ranges_and_meshes(history: History) -> None:
    history.add_mesh("sea")
    history.accept(f"id-{number}" for number in range(40))
    history.accept(["theirs"], mesh="sea")
    options = read_options({"database_url": history.url, "partition_rows": "10"}, streaming=False)
    reader = PushingHistoryReader(options, SCHEMA)
    assert len(reader.partitions()) == 5
    filters = [EqualTo(("mesh",), "demo"), GreaterThan(("history_id",), 15), LessThanOrEqual(("history_id",), 30)]
    assert list(reader.pushFilters(filters)) == filters
    parts = reader.partitions()

    assert [(part.after, part.last) for part in parts] == [(14, 24), (24, 30)]
    assert sum(batch.num_rows for part in parts for batch in reader.read(part)) == 16


def test_a_filter_does_not_widen_what_an_option_has_narrowed(history: History) -> None:
    options = read_options({"database_url": history.url, "mesh": "demo", "to": "topic:news"}, streaming=False)
    history.add_mesh("sea")
    history.accept(["ours"])
    history.accept(["theirs"], "topic:news", mesh="sea")
    reader = PushingHistoryReader(options, SCHEMA)
    reader.pushFilters([EqualTo(("mesh",), "sea"), EqualTo(("to",), "topic:orders")])

    assert [batch.num_rows for part in reader.partitions() for batch in reader.read(part)] == []


def test_a_read_has_no_more_tasks_than_it_may_have_connections(history: History) -> None:
    history.add_mesh("sea")
    history.accept(f"id-{number}" for number in range(40))
    history.accept((f"sea-{number}" for number in range(7)), mesh="sea")
    options = {"database_url": history.url, "partition_rows": "5", "max_connections": "3"}
    reader = HistoryReader(read_options(options, streaming=False), SCHEMA)
    parts = reader.partitions()
    stream = stream_reader(history, partition_rows="5", max_connections="3")

    assert len(parts) == 3
    read = [name for part in parts for batch in reader.read(part) for name in batch["client_message_id"].to_pylist()]
    assert len(read) == len(set(read)) == 47
    assert len(stream.partitions({}, {"1": 40, "2": 7})) == 3


def test_what_a_filter_cannot_say_leaves_nothing_out() -> None:
    odd = [EqualTo(("broker_message_id",), "x"), EqualTo(("history_id",), None), EqualTo(("body",), "x")]
    odd += [EqualTo((column,), "a\0b") for column in ("mesh", "sender", "to", "client_message_id")]
    assert Conditions().narrowed(odd) == Conditions()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sinse": "2026-11-01"}, "has no option 'sinse'"),
        ({"database_url": ""}, "the option database_url is empty"),
        ({"since": "yesterday"}, "use a day or a time"),
        ({"since": "0001-01-01T00:00:00+01:00"}, "use a day or a time"),
        ({"until": "9999-12-31T23:59:59-01:00"}, "use a day or a time"),
        ({"mesh": "a\0b"}, "is not a mesh's name"),
        ({"partition_rows": "9" * 5000}, "a whole number, 1 or more"),
        ({"since": "2026-11-02", "until": "2026-11-02"}, "not after since"),
        ({"partition_rows": "0"}, "a whole number, 1 or more"),
        ({"max_connections": "none"}, "a whole number, 1 or more"),
        ({"to": "orders"}, "topic:<name>"),
        ({"failOnDataLoss": "false"}, "for streams"),
        ({"max_rows_per_batch": "5"}, "for streams"),
        ({"push_filters": "perhaps"}, "true or false"),
    ],
)
def test_options_that_are_wrong_say_what_to_do(options: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidMessage, match=sentence):
        read_options({"database_url": "postgresql://x/y", **options}, streaming=False)


def test_a_stream_has_no_end_and_a_source_needs_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSTROOM_DATABASE_URL", raising=False)
    with pytest.raises(InvalidMessage, match="a stream has no end"):
        read_options({"database_url": "postgresql://x/y", "until": "2026-11-01"}, streaming=True)
    with pytest.raises(InvalidMessage, match="set POSTROOM_DATABASE_URL"):
        read_options({}, streaming=False)


def test_an_unknown_mesh_or_column_is_an_error_that_says_so(spark: SparkSession, history: History) -> None:
    with pytest.raises(AnalysisException, match="there is no mesh 'see'"):
        load(spark, history, mesh="see").collect()
    reader = spark.read.format("postroom_history").option("database_url", history.url)
    with pytest.raises(AnalysisException, match="the history has no column bodi"):
        reader.schema("bodi STRING").load().collect()
    for schema, sentence in (("to STRING, to STRING", "has the column to twice"), (StructType(), "has no column")):
        with pytest.raises(AnalysisException, match=sentence):
            reader.schema(schema).load().collect()


def test_sql_reads_a_view_and_makes_no_table_whose_options_would_be_lost(spark: SparkSession, history: History) -> None:
    """Spark passes no options of a table to a source in Python: it would be the whole history."""
    history.add_mesh("other")
    history.accept(["other-1"], mesh="other")
    options = f"database_url '{history.url}', mesh 'other'"
    spark.sql(f"CREATE TEMPORARY VIEW part USING postroom_history OPTIONS ({options})")
    try:
        assert [row.client_message_id for row in spark.sql("SELECT * FROM part").collect()] == ["other-1"]
    finally:
        spark.catalog.dropTempView("part")
    with pytest.raises(AnalysisException, match="CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE part USING postroom_history OPTIONS ({options})")


def test_a_stream_that_dies_in_a_batch_goes_on_without_loss_or_repeat(
    spark: SparkSession, history: History, tmp_path: Path
) -> None:
    history.accept(f"id-{number:02}" for number in range(30))
    source = spark.readStream.format("postroom_history").options(database_url=history.url, max_rows_per_batch=12)
    out, seen = str(tmp_path / "out"), []

    def write(batch: DataFrame, number: int) -> None:
        seen.append((number, ids(batch)))
        batch.write.mode("overwrite").parquet(f"{out}/batch={number}")
        if len(seen) == 2:
            raise RuntimeError("killed after writing, before its commit")

    def start() -> None:
        writing = source.load().writeStream.foreachBatch(write).trigger(availableNow=True)
        writing.option("checkpointLocation", str(tmp_path / "checkpoint")).start().awaitTermination()

    with pytest.raises(StreamingQueryException, match="killed after writing"):
        start()
    history.accept(f"later-{number}" for number in range(3))
    start()

    assert seen[1] == seen[2]  # the same batch again: Spark asks for what the checkpoint planned
    assert ids(spark.read.parquet(out)) == [f"id-{number:02}" for number in range(30)] + [
        f"later-{number}" for number in range(3)
    ]


def test_a_stream_waits_for_a_database_that_restarts(
    history: History, postgres_server: EmbeddedPostgres, short_directory: Path
) -> None:
    history.accept(f"id-{number}" for number in range(3))
    path = short_directory / "postgres"
    away = history.url.replace(quote(str(postgres_server.socket_directory), safe=""), quote(str(path), safe=""))
    stream = HistoryStreamReader(read_options({"database_url": away}, streaming=True), SCHEMA)
    with away_once(path, postgres_server.socket_directory):
        end = stream.latestOffset({}, ReadAllAvailable())
    (part,) = stream.partitions({}, end)
    with away_once(path, postgres_server.socket_directory):
        assert sum(batch.num_rows for batch in stream.read(part)) == 3


@contextmanager
def away_once(path: Path, directory: Path) -> Iterator[None]:
    """Hang up on the first who connects to a Postgres at `path`; afterwards it leads to the one in `directory`."""
    path.unlink(missing_ok=True)
    path.mkdir()
    name = path / next(directory.glob(".s.PGSQL.*[0-9]")).name
    with socket.socket(socket.AF_UNIX) as door, ThreadPoolExecutor(1) as threads:

        def hang_up() -> None:
            connection, _ = door.accept()
            name.unlink()
            path.rmdir()
            path.symlink_to(directory)
            connection.close()

        door.bind(str(name))
        door.listen()
        done = threads.submit(hang_up)
        yield
        done.result()


@contextmanager
def held_open(history: History, statement: str) -> Iterator[asyncio.Runner]:
    """Keep a transaction open that has run `statement`; it commits at the end."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        connection = runner.run(asyncpg.connect(history.url))
        transaction = connection.transaction()
        runner.run(transaction.start())
        runner.run(connection.execute(statement))
        yield runner
        runner.run(transaction.commit())
        runner.run(connection.close())


COPY = (
    "INSERT INTO mesh.message_history SELECT mesh_id, {number}, gen_random_uuid(), client_message_id, sender_id, "
    "destination_kind, destination_id, destination_ref, 0, now(), expires_at "
    "FROM mesh.message_history WHERE history_id = 1"
)


def test_a_row_that_commits_late_is_not_skipped(spark: SparkSession, history: History, tmp_path: Path) -> None:
    history.accept(f"id-{number}" for number in range(5))
    narrow = "history_id BIGINT, client_message_id STRING"

    def stream() -> list[int]:
        source = spark.readStream.format("postroom_history").option("database_url", history.url).schema(narrow).load()
        writing = source.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writing.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()
        return sorted(row["history_id"] for row in spark.read.parquet(str(tmp_path / "out")).collect())

    with held_open(history, COPY.format(number=6)):
        history.execute(COPY.format(number=7))  # a later number that is visible first
        history.execute("SELECT setval('mesh.history_1', 7)")
        assert stream() == [1, 2, 3, 4, 5]

    assert stream() == [1, 2, 3, 4, 5, 6, 7]


def test_an_accept_in_progress_holds_back_its_own_mesh_alone(history: History) -> None:
    history.add_mesh("sea")
    history.accept(["first"])
    reader = stream_reader(history)
    with held_open(history, "SELECT mesh.take_history_ids(1, 1)"):
        before = reader.latestOffset({}, ReadAllAvailable())
    history.accept(["second"])

    assert before == {"1": 1}
    assert reader.latestOffset(before, ReadAllAvailable()) == {"1": 3}  # the number 2 was taken and never used


def test_a_batch_of_a_stream_has_about_as_many_rows_as_asked_for(history: History) -> None:
    history.add_mesh("sea")
    history.accept(f"id-{number}" for number in range(20))
    history.accept((f"sea-{number}" for number in range(20)), mesh="sea")
    reader = stream_reader(history)
    start = reader.initialOffset()
    first = reader.latestOffset(start, ReadMaxRows(8))

    assert first == {"1": 4, "2": 4} | start
    assert reader.latestOffset(first, ReadMaxRows(1)) == {"1": 5, "2": 5} | start
    assert reader.latestOffset(first, ReadAllAvailable()) == {"1": 20, "2": 20} | start
    assert [(part.mesh_id, part.after, part.last) for part in reader.partitions(first, {"1": 6, "2": 4})] == [(1, 4, 6)]


@pytest.fixture
def restored(history: History, postgres_server: EmbeddedPostgres) -> Iterator[History]:
    """A history of three messages that had six, and has two since it was restored."""
    name = history.url.partition("?")[0].rpartition("/")[2]
    history.accept(f"id-{number}" for number in range(3))
    run(back_up(postgres_server, name))
    history.accept(f"lost-{number}" for number in range(3))
    run(restore(postgres_server, name))
    history.accept(["id-3", "id-4"])
    yield history
    run(forget(postgres_server, name))


def test_a_stream_that_has_read_what_a_restore_took_fails_unless_it_may_lose(restored: History) -> None:
    with pytest.raises(Gone, match="was restored to an earlier state") as refusal:
        stream_reader(restored).latestOffset({"1": 5}, ReadAllAvailable())
    problem = refusal.value.problem
    assert (problem.status, problem.code, problem.resume_after) == (410, "history_restored", 3)

    reader = stream_reader(restored, failOnDataLoss="false")
    end = reader.latestOffset({"1": 5}, ReadAllAvailable())
    parts = reader.partitions({"1": 5}, end)
    assert [part.last - part.after for part in parts] == [2]


def test_the_numbers_that_a_restore_skips_cost_nothing(spark: SparkSession, restored: History) -> None:
    expected = ["id-0", "id-1", "id-2", "id-3", "id-4"]
    assert ids(load(spark, restored)) == expected
    assert ids(load(spark, restored, since="2020-01-01T00:00:00Z")) == expected
    reader = stream_reader(restored)
    parts = reader.partitions({"1": 1}, reader.latestOffset({"1": 1}, ReadAllAvailable()))
    assert [part.last - part.after for part in parts] == [2, 2]


def test_a_history_that_ends_before_the_checkpoint_is_refused(history: History) -> None:
    history.accept(["first"])
    with pytest.raises(Conflict, match="was an older database restored"):
        stream_reader(history).latestOffset({"1": 40}, ReadAllAvailable())


@pytest.mark.parametrize("offset", [7, [1, 2], {"logOffset": 0}, {"1": {"0": 12}}])
def test_a_checkpoint_of_another_source_is_refused(history: History, offset: Any) -> None:
    reader = stream_reader(history)
    with pytest.raises(Conflict, match="the checkpoint is of a stream that reads something else"):
        reader.latestOffset(offset, ReadAllAvailable())
    with pytest.raises(Conflict, match="the checkpoint is of a stream that reads something else"):
        reader.partitions({}, offset)


def test_a_checkpoint_of_another_database_is_refused(history: History) -> None:
    history.accept(["id-1", "id-2"])
    reader = stream_reader(history)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    history.tamper("UPDATE mesh.incarnation SET id = gen_random_uuid()")
    with pytest.raises(Conflict, match="the checkpoint is of a stream over another database"):
        reader.latestOffset(end, ReadAllAvailable())
    with pytest.raises(Conflict, match="the checkpoint is of a stream over another database"):
        reader.partitions(start, end)


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ({"to": "topic:orders"}, {"to": "topic:others"}, "to topic:orders, and this one is to topic:others"),
        ({"to": "topic:orders"}, {}, "to topic:orders, and this one is to everything"),
        ({}, {"to": "topic:orders"}, "to everything, and this one is to topic:orders"),
    ],
)
def test_a_checkpoint_of_a_stream_that_omits_other_messages_is_refused(
    history: History, before: dict[str, str], after: dict[str, str], difference: str
) -> None:
    history.accept(["id-1", "id-2"])
    reader = stream_reader(history, **before)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    other = stream_reader(history, **after)
    with pytest.raises(Conflict, match=f"the checkpoint is of a stream {difference}: .* or a new one"):
        other.latestOffset(end, ReadAllAvailable())
    with pytest.raises(Conflict, match=difference):
        other.partitions(start, end)
    assert stream_reader(history, **before).latestOffset(end, ReadAllAvailable()) == end


def test_a_checkpoint_behind_the_retention_fails_the_stream(
    spark: SparkSession, history: History, tmp_path: Path
) -> None:
    history.accept(f"id-{number}" for number in range(3))

    def stream(**options: str) -> list[str]:
        source = spark.readStream.format("postroom_history").options(database_url=history.url, **options).load()
        writing = source.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        writing.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()
        return ids(spark.read.parquet(str(tmp_path / "out")))

    stream()
    history.accept(f"id-{number}" for number in range(3, 6))
    history.execute("DELETE FROM mesh.message_history WHERE history_id <= 5")

    with pytest.raises(StreamingQueryException, match=r"is at history_id 3, .* some up to 5. .*failOnDataLoss"):
        stream()
    assert stream(failOnDataLoss="false") == ["id-0", "id-1", "id-2", "id-5"]
    history.execute("DELETE FROM mesh.message_history WHERE history_id <= 6")
    assert stream() == ["id-0", "id-1", "id-2", "id-5"]


def test_a_batch_that_was_planned_before_its_rows_were_deleted_is_lost_too(history: History) -> None:
    history.accept(f"id-{number}" for number in range(6))
    reader = stream_reader(history)
    end = reader.latestOffset({}, ReadAllAvailable())
    (part,) = reader.partitions({}, end)
    history.execute("DELETE FROM mesh.message_history WHERE history_id <= 2")

    with pytest.raises(Conflict, match="of the mesh demo were deleted"):  # Spark plans it again after a restart
        reader.partitions({}, end)
    with pytest.raises(Conflict, match="of the mesh demo were deleted"):  # and a task may begin late
        list(reader.read(part))


def test_a_task_that_misses_rows_which_were_deleted_meanwhile_says_so_where_it_may(
    history: History, capfd: pytest.CaptureFixture[str]
) -> None:
    history.accept(f"id-{number}" for number in range(6))
    reader = stream_reader(history, failOnDataLoss="false")
    (part,) = reader.partitions({}, end := reader.latestOffset({}, ReadAllAvailable()))
    history.execute("DELETE FROM mesh.message_history WHERE history_id <= 2")

    assert sum(batch.num_rows for batch in reader.read(part)) == 4
    lost = "it is at history_id 0, and retention has deleted some up to 2; the stream continues without them"
    assert lost in capfd.readouterr().err
    assert reader.latestOffset(end, ReadAllAvailable()) == end  # the driver does not learn of it any more


def test_a_stream_whose_lost_rows_leave_nothing_goes_past_them(
    history: History, capfd: pytest.CaptureFixture[str]
) -> None:
    history.accept(f"id-{number}" for number in range(4))
    history.execute("DELETE FROM mesh.message_history")
    reader = stream_reader(history, failOnDataLoss="false")

    assert reader.latestOffset({"1": 2}, ReadAllAvailable()) == {"1": 4}
    assert (
        "it is at history_id 2, and retention has deleted some up to 4; the stream continues" in capfd.readouterr().err
    )
    assert reader.partitions({"1": 2}, {"1": 4}) == []


def test_what_was_deleted_before_a_stream_began_is_no_loss_of_its_own(history: History) -> None:
    history.accept(f"id-{number}" for number in range(6))
    history.execute("DELETE FROM mesh.message_history WHERE history_id IN (5, 6)")  # as a retention that was shortened
    reader = stream_reader(history)
    start = reader.initialOffset()
    begun = {"database": start["database"], "deletion": 1}
    first = reader.latestOffset(start, ReadMaxRows(2))
    assert first == {"1": 2} | begun
    assert [(part.after, part.last) for part in reader.partitions(start, first)] == [(0, 2)]

    history.execute("DELETE FROM mesh.message_history WHERE history_id IN (1, 2)")  # they were read
    assert reader.latestOffset(first, ReadAllAvailable()) == {"1": 4} | begun
    history.execute("DELETE FROM mesh.message_history WHERE history_id = 3")  # below the first deletion
    with pytest.raises(Conflict, match=r"is at history_id 2, .* some up to 3"):
        reader.latestOffset(first, ReadAllAvailable())


def test_a_stream_can_be_of_one_destination(history: History) -> None:
    history.accept(["a", "b"])
    history.accept(["c"], to="topic:news")
    reader = stream_reader(history, to="topic:news")
    found = [
        batch.to_pylist() for part in reader.partitions(reader.initialOffset(), {"1": 3}) for batch in reader.read(part)
    ]
    assert [row["client_message_id"] for rows in found for row in rows] == ["c"]


def test_since_stays_what_it_was_when_the_stream_began(history: History) -> None:
    """A start may compute it, and what lies before it then is no less unread."""
    history.accept(["a", "b", "late", "c"])
    history.tamper("UPDATE mesh.message_history SET accepted_at = '2026-11-01' WHERE history_id IN (1, 3)")
    history.tamper("UPDATE mesh.message_history SET accepted_at = '2026-11-03' WHERE history_id IN (2, 4)")
    start = stream_reader(history, since="2026-11-02").initialOffset()
    assert start["1"] == 1
    again = stream_reader(history, since="2026-11-09")
    end = again.latestOffset(start, ReadAllAvailable())
    found = [batch.to_pylist() for part in again.partitions(start, end) for batch in again.read(part)]
    assert [row["client_message_id"] for rows in found for row in rows] == ["b", "c"]


def test_a_stream_begins_where_since_says(history: History) -> None:
    history.accept(f"id-{number}" for number in range(6))
    history.tamper("UPDATE mesh.message_history SET accepted_at = '2026-11-01' WHERE history_id <= 4")

    assert stream_reader(history, since="2026-11-02").initialOffset()["1"] == 4
    assert stream_reader(history, since="2026-11-01").initialOffset()["1"] == 0
    assert stream_reader(history, since="2999-01-01").initialOffset()["1"] == 6


def test_since_and_until_are_found_by_time_whatever_else_is_kept(history: History) -> None:
    fill(history, 20_000)
    minute = {"since": "2026-11-01T01:00", "until": "2026-11-01T01:01"}
    reader = HistoryReader(read_options({"database_url": history.url, **minute}, streaming=False), SCHEMA)
    window = [datetime.fromisoformat(f"2026-11-01T{time}Z") for time in ("01:00", "01:01")]

    assert [(part.after, part.last) for part in reader.partitions()] == [(3599, 3659)]
    plan = explain(history, "extent_within", None, *window)
    assert "message_history_time" in {node.get("Index Name") for node in plan}
    assert most_rows(plan) <= 61  # what lies between them
    assert most_rows(explain(history, "beginning", None, window[0] + timedelta(hours=4))) <= 2001


def test_a_stream_costs_what_is_new_and_not_what_is_kept(history: History) -> None:
    fill(history, 20_000)
    reader = stream_reader(history)
    reader.prepareForTriggerAvailableNow()

    assert reader.latestOffset({"1": 19_990}, ReadAllAvailable()) == {"1": 20_000}
    assert most_rows(explain(history, "newest", None)) == 1
    with held_open(history, "UPDATE mesh.mesh SET slug = slug"):  # so that the rows are looked through
        assert most_rows(explain(history, "latest", None, [1], [19_990], None, 0)) <= 10
    assert most_rows(explain(history, "next", [1], [10], 0)) == 1


def test_a_stream_says_how_far_it_is_behind(spark: SparkSession, history: History, tmp_path: Path) -> None:
    history.accept(f"id-{number}" for number in range(6))
    source = spark.readStream.format("postroom_history").options(database_url=history.url, max_rows_per_batch=4).load()
    writing = source.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writing.trigger(availableNow=True).start()
    query.awaitTermination()
    (first,) = query.recentProgress[0].sources

    assert (json.loads(first.endOffset)["1"], json.loads(first.latestOffset)) == (4, {"1": 6})


@pytest.mark.soak
def test_nothing_new_takes_as_long_at_300_000_rows_as_at_10_000(
    spark: SparkSession, history: History, tmp_path: Path
) -> None:
    def stream() -> float:
        source = spark.readStream.format("postroom_history").option("database_url", history.url)
        narrow = source.schema("history_id BIGINT").load()
        writing = narrow.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        began = time.perf_counter()
        writing.trigger(availableNow=True).start(str(tmp_path / "out")).awaitTermination()
        return time.perf_counter() - began

    fill(history, 10_000)
    stream()
    few = statistics.median(stream() for _ in range(5))
    fill(history, 290_000)
    stream()
    many = statistics.median(stream() for _ in range(5))
    print(f"seconds with nothing new at 10,000 and 300,000 rows: {few:.2f}, {many:.2f}")  # noqa: T201
    assert many < 1.3 * few


def fill(history: History, rows: int) -> None:
    """Put messages into the history, one a second from the first of November on."""
    history.execute(
        "WITH taken AS MATERIALIZED (SELECT mesh.take_history_ids(1, $1) AS last) "
        "INSERT INTO mesh.message_history SELECT 1, last + number, gen_random_uuid(), last + number, 1, 'topic', 1, "
        "'orders', 0, timestamptz '2026-11-01Z' + interval '1 s' * (last + number), '2999-01-01' "
        "FROM taken, generate_series(1, $1) AS number",
        rows,
    )
    history.execute("VACUUM ANALYZE mesh.message_history")


def explain(history: History, query: str, *arguments: Any) -> list[dict[str, Any]]:
    """Run a query of the source as the source does; return the nodes of its plan."""

    async def run() -> Any:
        connection = await connect(history.url, _SETTINGS)
        try:
            return await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {QUERIES[query]}", *arguments)
        finally:
            await connection.close()

    def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield plan
        for child in plan.get("Plans", ()):
            yield from nodes(child)

    return list(nodes(json.loads(asyncio.run(run()))[0]["Plan"]))


def most_rows(plan: list[dict[str, Any]]) -> float:
    """Return the most rows that any part of a plan has looked at."""
    return max(node["Actual Rows"] * node["Actual Loops"] + node.get("Rows Removed by Filter", 0) for node in plan)


def stream_reader(history: History, **options: str) -> HistoryStreamReader:
    return HistoryStreamReader(read_options({"database_url": history.url, **options}, streaming=True), SCHEMA)
