"""Each pipeline does what it is for, and a second run does nothing twice (docs/contract/spark.md#spark-20)."""

from __future__ import annotations

import errno
import filecmp
import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession
from support.histories import History, run

from broker.__main__ import find_orphans as check_in_sql
from pipeline.audit_log import write_days
from pipeline.delivery_report import draw
from pipeline.runner import Outcome, run_by_name
from postroom._wire.words import counted
from postroom.chassis.exits import Exit, Fatal
from postroom.errors import PostroomError

KEPT = timedelta(days=30)

DAMAGE = (
    "DELETE FROM mesh.topic_message WHERE client_message_id = 'orders-1'",
    "DELETE FROM mesh.message_history WHERE client_message_id = 'orders-2'",
    "DELETE FROM mesh.delivery_queue WHERE history_id = 4",
    "DELETE FROM mesh.client_message_dedupe WHERE client_message_id IN ('orders-4', 'bob-1')",
    "DELETE FROM postroom.outbox_events WHERE event_type = 'work' AND payload ->> 'client_message_id' = 'work-1'",
    "UPDATE mesh.client_message_dedupe SET history_available = false WHERE client_message_id = 'work-2'",
)

# An event and a delivery that an operator took out.
DROPPED = (
    """
    WITH dropped AS (
      DELETE FROM postroom.outbox_events WHERE payload ->> 'client_message_id' = 'orders-7' RETURNING *
    )
    INSERT INTO postroom.dropped_events
    SELECT id, aggregate_type, aggregate_id, event_type, event_version, subject, payload, occurred_at, correlation_id,
      causation_id, 1, 'refused', now(), 'olga', 'a test'
    FROM dropped
    """,
    """
    WITH dropped AS (DELETE FROM mesh.delivery_queue WHERE history_id = 9 RETURNING *)
    INSERT INTO postroom.dropped_deliveries
    SELECT broker_message_id, recipient_id, 'bob', 'demo.inbox.bob', enqueued_at, 1, 'refused', now(), 'olga', 'a test'
    FROM dropped
    """,
)


@pytest.fixture
def history(database_url: str) -> History:
    made = History(database_url)
    made.accept((f"orders-{number}" for number in range(20)), mentions=["bob"])
    made.accept((f"bob-{number}" for number in range(5)), "dm:bob")
    made.accept((f"work-{number}" for number in range(5)), "queue:work")
    return made


@pytest.fixture
def pipeline(spark: SparkSession, history: History, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How to run a pipeline over this history in the session of the tests."""
    del spark
    monkeypatch.setenv("POSTROOM_DATABASE_URL", history.url)

    def run_pipeline(name: str, *words: str) -> Outcome:
        return run_by_name(name, words)

    return run_pipeline


def test_the_orphan_check_gives_the_answer_of_the_sql_check(history: History, pipeline: Any) -> None:
    history.tamper(*DROPPED)
    assert run(check_in_sql(history.url, events_kept=KEPT)) == []
    assert pipeline("orphan-check") == ({"violations": 0}, False)

    history.tamper(*DAMAGE)
    in_sql = run(check_in_sql(history.url, events_kept=KEPT))
    assert len(in_sql) == 9
    assert pipeline("orphan-check") == (
        {each.kind: f"{counted(each.rows, 'row')}: {', '.join(map(str, each.examples))}" for each in in_sql},
        True,
    )


def test_rate_telemetry_counts_each_message_once_and_keeps_what_retention_deletes(
    history: History, pipeline: Any
) -> None:
    first = pipeline("rate-telemetry", "window_seconds=3600")
    history.tamper("DELETE FROM mesh.message_history WHERE history_id <= 7")
    second = pipeline("rate-telemetry", "window_seconds=3600")

    assert first.facts["messages"] == 30
    assert second == first
    expected = history.fetch(
        "SELECT DISTINCT to_timestamp(floor(extract(epoch FROM accepted_at) / 3600) * 3600) FROM mesh.topic_message"
    )
    starts = history.fetch("SELECT DISTINCT window_start FROM pipeline.rate_limit_counter")
    assert {row[0] for row in expected} <= {row[0] for row in starts}


def test_the_search_index_finds_words_and_forgets_what_retention_deletes(history: History, pipeline: Any) -> None:
    history.accept(["fish-1"], body="Salmon for the captain")
    history.accept(["bytes-1"], body=None, body_base64="AAEC")
    find = (
        "SELECT broker_message_id FROM pipeline.search_index "
        "WHERE words @@ websearch_to_tsquery('simple', 'captain salmon')"
    )

    assert pipeline("search-index").facts == {"indexed": 31, "deleted": 0}
    assert pipeline("search-index").facts == {"indexed": 31, "deleted": 0}
    assert len(history.fetch(find)) == 1

    history.tamper("DELETE FROM mesh.message_history WHERE client_message_id = 'fish-1'")
    assert pipeline("search-index").facts == {"indexed": 30, "deleted": 1}
    assert history.fetch(find) == []


def test_the_audit_log_is_written_once_and_is_byte_identical_when_rebuilt(
    history: History, pipeline: Any, tmp_path: Path
) -> None:
    history.tamper(
        "UPDATE mesh.message_history SET accepted_at = accepted_at - (history_id % 3 + 2) * interval '1 day'"
    )
    exported = tmp_path / "export.ndjson"
    rows = [outbox_row(number) for number in range(4)]
    exported.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    first = pipeline("audit-log", f"output={tmp_path}/a", f"outbox={exported}")
    again = pipeline("audit-log", f"output={tmp_path}/a", f"outbox={exported}")
    rebuilt = pipeline("audit-log", f"output={tmp_path}/b", f"outbox={exported}")

    assert first.facts == rebuilt.facts == {"days written": 5, "rows written": 34}
    assert again.facts == {"days kept": 5, "rows written": 0}
    assert filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", files(tmp_path / "a"), shallow=False) == (
        files(tmp_path / "a"),
        [],
        [],
    )

    history.tamper("UPDATE mesh.message_history SET recipients = 7 WHERE history_id = 3")
    verified = pipeline("audit-log", f"output={tmp_path}/a", "verify=true")
    assert verified.failed
    assert verified.facts["days different"] == 1
    assert verified.facts["days same"] == 2


def test_the_audit_log_is_of_whole_days_whichever_time_it_is_to_end_at(
    history: History, pipeline: Any, tmp_path: Path
) -> None:
    history.tamper("UPDATE mesh.message_history SET accepted_at = date_trunc('day', now(), 'UTC') - interval '2 days'")
    noon = (datetime.now(UTC) - timedelta(days=2)).replace(hour=12, minute=0)
    assert pipeline("audit-log", f"output={tmp_path}", f"before={noon.isoformat()}").facts == {"rows written": 0}
    with pytest.raises(Fatal, match="before is 'yesterday'"):
        pipeline("audit-log", f"output={tmp_path}", "before=yesterday")
    assert pipeline("audit-log", f"output={tmp_path}").facts == {"days written": 1, "rows written": 30}


def test_the_audit_log_writes_the_days_that_are_over_by_the_clock_of_postgres(
    history: History, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written of a day is never completed."""
    history.tamper(
        "UPDATE mesh.message_history SET accepted_at = now()",
        "CREATE SCHEMA ahead",
        "CREATE FUNCTION ahead.now() RETURNS timestamptz LANGUAGE sql RETURN pg_catalog.now() + interval '400 days'",
    )
    assert pipeline("audit-log", f"output={tmp_path}").facts == {"rows written": 0}
    join = "&" if "?" in history.url else "?"
    monkeypatch.setenv("POSTROOM_DATABASE_URL", f"{history.url}{join}search_path=ahead,pg_catalog")
    assert pipeline("audit-log", f"output={tmp_path}").facts["days written"] == 1


def test_the_audit_log_neither_writes_nor_compares_a_day_of_which_retention_has_deleted_messages(
    history: History, pipeline: Any, tmp_path: Path
) -> None:
    """What is left of it would be kept as if it were whole."""
    history.tamper(
        "UPDATE mesh.message_history SET accepted_at = "
        "date_trunc('day', now(), 'UTC') - (2 + history_id % 2) * interval '1 day' + history_id * interval '1 minute'"
    )
    before = pipeline("audit-log", f"output={tmp_path}/before")
    assert before.facts == {"days written": 2, "rows written": 30}
    history.execute("DELETE FROM mesh.message_history WHERE history_id = 1")
    day = f"{datetime.now(UTC) - timedelta(days=3):%Y-%m-%d}"

    late = pipeline("audit-log", f"output={tmp_path}/late")
    assert late.failed
    assert late.facts == {
        "days written": 1,
        "days missed": 1,
        "rows written": 15,
        f"history of {day}": "not written: retention has deleted messages of it",
    }
    assert not (tmp_path / f"late/history/day={day}").exists()

    kept = pipeline("audit-log", f"output={tmp_path}/before")
    assert (kept.facts, kept.failed) == ({"days kept": 2, "rows written": 0}, False)
    verified = pipeline("audit-log", f"output={tmp_path}/before", "verify=true")
    assert not verified.failed
    assert verified.facts == {
        "days same": 1,
        "days unverified": 1,
        "rows written": 0,
        f"history of {day}": "not compared: retention has deleted messages of it",
    }


def test_what_a_killed_task_left_of_a_day_is_removed_and_what_another_writes_is_not(tmp_path: Path) -> None:
    day = tmp_path / "day=2026-10-01"
    day.mkdir()
    for name, age in ((".part-left", timedelta(days=2)), (".part-written-now", timedelta(0))):
        (day / name).touch()
        os.utime(day / name, times=(time.time() - age.total_seconds(),) * 2)
    rows = pa.RecordBatch.from_pydict({"day": ["2026-10-01"], "number": [1]})
    (done,) = write_days(tmp_path, iter([rows]), verify=False)

    assert done.to_pylist() == [{"source": tmp_path.name, "day": "2026-10-01", "rows": 1, "became": "written"}]
    assert files(day) == [".part-written-now", "part.parquet"]


@pytest.mark.parametrize("links", ["with", "without"])
def test_a_day_has_its_name_when_it_is_on_disk_also_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    synced: list[tuple[int, int]] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))
        sync(descriptor)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fsync", record)
    if links == "without":
        monkeypatch.setattr(os, "link", refuse)
    rows = pa.RecordBatch.from_pydict({"day": ["2026-10-01"], "number": [1]})
    (done,) = write_days(tmp_path, iter([rows]), verify=False)
    (again,) = write_days(tmp_path, iter([rows]), verify=True)

    file = tmp_path / "day=2026-10-01/part.parquet"
    assert (done["became"].to_pylist(), again["became"].to_pylist()) == (["written"], ["same"])
    assert (file.stat().st_ino, file.stat().st_size) in synced
    assert files(file.parent) == ["part.parquet"]


def files(directory: Path) -> list[str]:
    return sorted(str(file.relative_to(directory)) for file in directory.rglob("*") if file.is_file())


def outbox_row(number: int) -> dict[str, Any]:
    return {
        "id": f"row-{number}",
        "client_message_id": f"orders-{number}",
        "status": "done",
        "destination": "topic:orders",
        "priority": "next",
        "enqueued_at": f"2026-10-0{number % 2 + 1}T23:59:59.5Z",
        "attempts": 1,
        "request_fingerprint": "00ff00ff00ff00ff",
    }


def test_the_delivery_report_gives_percentiles_by_day_and_a_picture(
    history: History, pipeline: Any, tmp_path: Path
) -> None:
    history.tamper(
        "UPDATE mesh.message_history SET accepted_at = '2026-11-20T23:00Z'",
        "UPDATE mesh.delivery_queue SET published_at = timestamptz '2026-11-20T23:00Z' + history_id * interval '1 ms', "
        "stream = 's', stream_created_at = now(), stream_sequence = history_id * 100 + recipient_id",
    )
    outcome = pipeline("delivery-report", f"output={tmp_path}/report", "since=2026-11-20", "until=2026-11-21")

    assert outcome.facts["deliveries"] == 45
    assert outcome.facts["topic:orders published on 2026-11-20"] == "p50 10.5 ms, p99 20.0 ms"
    assert (tmp_path / "report/latency.png").read_bytes().startswith(b"\x89PNG")
    again = pipeline("delivery-report", f"output={tmp_path}/report", "until=2026-11-20")
    assert again.facts["deliveries"] == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["mesh=nope"], "there is no mesh 'nope'"),
        (["since=2026-11-21", "until=2026-11-20"], "until is not after since"),
    ],
)
@pytest.mark.parametrize("name", ["rate-telemetry", "search-index", "delivery-report"])
def test_a_part_of_the_history_that_cannot_be_is_refused(
    pipeline: Any, name: str, words: list[str], sentence: str, tmp_path: Path
) -> None:
    output = [f"output={tmp_path}"] if name == "delivery-report" else []
    with pytest.raises((Fatal, PostroomError), match=sentence):
        pipeline(name, *output, *words)


def test_a_report_that_cannot_be_finished_leaves_the_one_before_and_nothing_else(
    history: History, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history.accept(["id-1"])

    def full(_latencies: object, file: Path) -> None:
        file.write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device", str(file))

    pipeline("delivery-report", f"output={tmp_path}")
    picture = (tmp_path / "latency.png").read_bytes()
    monkeypatch.setattr("pipeline.delivery_report.draw", full)
    with pytest.raises(Fatal, match="No space left on device"):
        pipeline("delivery-report", f"output={tmp_path}")
    assert {file.name for file in tmp_path.iterdir()} == {"latency.parquet", "latency.png"}
    assert (tmp_path / "latency.png").read_bytes() == picture


def test_two_reports_at_once_are_both_whole(
    history: History, pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del history
    words = "delivery-report", f"output={tmp_path}"

    def draw_beside_another(latencies: Any, file: Path) -> None:
        draw(latencies, file)
        monkeypatch.setattr("pipeline.delivery_report.draw", draw)
        pipeline(*words)

    monkeypatch.setattr("pipeline.delivery_report.draw", draw_beside_another)
    pipeline(*words)
    assert files(tmp_path) == ["latency.parquet", "latency.png"]


@pytest.mark.parametrize("output", ["s3a://bucket/audit", "file:/srv/audit"])
@pytest.mark.parametrize("words", ["audit-log", "delivery-report", "state-hash stores=*.db"])
def test_an_output_that_only_spark_could_write_to_is_refused(
    pipeline: Any, words: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Fatal, match=f"output is '{output}': give the path of a directory") as raised:
        pipeline(*words.split(), f"output={output}")
    assert raised.value.exit_code == Exit.USAGE
    assert list(tmp_path.iterdir()) == []


def test_an_audit_log_that_cannot_be_written_or_read_says_why(history: History, pipeline: Any, tmp_path: Path) -> None:
    history.tamper("UPDATE mesh.message_history SET accepted_at = '2026-10-01Z'")
    (tmp_path / "file").touch()
    with pytest.raises(Fatal, match=r"^Not a directory: ") as unwritable:
        pipeline("audit-log", f"output={tmp_path}/file/audit")
    (tmp_path / "cut.ndjson").write_text(json.dumps(outbox_row(0)) + '\n{"id":"01')
    with pytest.raises(Fatal, match=r"cut\.ndjson") as unreadable:
        pipeline("audit-log", f"output={tmp_path}/audit", f"outbox={tmp_path}/*.ndjson")
    assert unwritable.value.exit_code == unreadable.value.exit_code == Exit.IO_ERROR
    (tmp_path / "other.jsonl").write_text('{"no": "row"}\n')
    with pytest.raises(Fatal, match=r"other\.jsonl has a line that is no row of an export: it has no enqueued_at$"):
        pipeline("audit-log", f"output={tmp_path}/audit", f"outbox={tmp_path}/*.jsonl")
    (tmp_path / "none").mkdir()
    with pytest.raises(Fatal, match=r"no export is in .*none; Spark passes over files whose names"):
        pipeline("audit-log", f"output={tmp_path}/audit", f"outbox={tmp_path}/none")
    assert not (tmp_path / "audit/outbox").exists()


def test_the_directories_of_exports_add_nothing_to_their_rows(pipeline: Any, tmp_path: Path) -> None:
    for number, name in enumerate(("host=a/status=lost", "plain")):
        (tmp_path / "exports" / name).mkdir(parents=True)
        (tmp_path / "exports" / name / "export.ndjson").write_text(json.dumps(outbox_row(2 * number)) + "\n")
    outcome = pipeline("audit-log", f"output={tmp_path}/audit", f"outbox={tmp_path}/exports")
    assert outcome.facts["rows written"] == 2
    (file,) = (tmp_path / "audit/outbox").glob("*/part.parquet")
    written = parquet.read_table(file, partitioning=None)
    assert "host" not in written.column_names
    assert written.column("status").to_pylist() == ["done", "done"]


@pytest.mark.parametrize("name", ["orphan-check", "rate-telemetry", "search-index"])
def test_a_database_of_another_version_is_refused_and_stays_as_it_is(
    spark: SparkSession, database_url: str, name: str
) -> None:
    del spark
    with pytest.raises(Fatal, match="postroom broker migrate"):
        run_by_name(name, [f"database_url={database_url}"])
    created = "SELECT FROM pg_namespace WHERE nspname IN ('pipeline', 'postroom')"

    async def found() -> list[Any]:
        connection = await asyncpg.connect(database_url)
        try:
            return list(await connection.fetch(created))
        finally:
            await connection.close()

    assert run(found()) == []


def test_timeouts_of_the_database_end_no_pipeline(history: History, pipeline: Any) -> None:
    """The driver's snapshot is idle while the tasks read in it, and a read takes as long as what consumes it."""
    (name,) = history.fetch("SELECT current_database() AS database")
    for setting in ("idle_in_transaction_session_timeout = '10ms'", "statement_timeout = '1ms'"):
        history.execute(f"ALTER DATABASE {name['database']} SET {setting}")
    assert pipeline("orphan-check").facts == {"violations": 0}
    assert pipeline("search-index").facts["indexed"] == 30


def test_a_database_that_ends_the_connection_of_a_task_is_the_reason_for_the_end(
    history: History, pipeline: Any
) -> None:
    pipeline("search-index")
    history.execute(
        "CREATE FUNCTION leave() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN new; END'"
    )
    history.execute("CREATE TRIGGER leave BEFORE INSERT ON pipeline.search_index FOR EACH ROW EXECUTE FUNCTION leave()")
    with pytest.raises(Fatal, match=r"^the database has ended the connection or the statement: .*terminat") as raised:
        pipeline("search-index")
    assert raised.value.exit_code == Exit.UNAVAILABLE
