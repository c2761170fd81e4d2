"""The options of the Spark sink: what is refused on the driver, before a row is sent, and with which sentence."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DayTimeIntervalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from postroom import InvalidMessage, PostroomError
from postroom.spark.options import plan_write
from postroom.spark.sink import RowProblem, write_problems

COLUMNS: dict[str, DataType] = {
    "order_id": LongType(),
    "line": StringType(),
    "weight": DoubleType(),
    "photo": BinaryType(),
    "at": TimestampType(),
    "tags": MapType(StringType(), LongType()),
}
ENOUGH = {"to": "topic:orders", "id": "order_id"}
JOB = {"job": "6fa459ea-ee8a-3ca4-894e-db77e160355e", "mesh": "demo", "database_url": "postgresql://host/postroom"}


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in (COLUMNS | columns).items()])


def test_the_least_that_a_write_needs_is_a_destination_and_an_id() -> None:
    plan = plan_write(ENOUGH, schema())
    assert (plan.options.to, plan.ids, plan.options.priority, plan.options.wait, plan.namespace) == (
        "topic:orders",
        ("order_id",),
        "next",
        "queued",
        "topic:orders",
    )


def test_data_without_a_column_is_said_to_have_none() -> None:
    """An empty file of CSV or JSON has none: the sentence ended where their names should begin."""
    with pytest.raises(InvalidMessage, match=r"is not a column; the DataFrame has no column$"):
        plan_write(ENOUGH, StructType([]))


def test_the_namespace_of_a_stream_holds_its_querys_name() -> None:
    given = ENOUGH | {"queryName": "nightly", "checkpointLocation": "/tmp/checkpoint"}  # noqa: S108 - never opened
    assert plan_write(given, schema()).namespace == "topic:orders nightly"


def test_without_an_id_the_error_says_why_there_is_no_default() -> None:
    with pytest.raises(InvalidMessage, match=r"more than once .* There is no safe default") as caught:
        plan_write({"to": "topic:orders"}, schema())
    assert caught.value.problem.field == "id"


@pytest.mark.parametrize(
    ("options", "field", "sentence"),
    [
        ({"to_column": "line"}, "to", "either `to`, .* or `to_column`"),
        ({"to": "orders"}, "to", "topic:<name>"),
        ({"to": ""}, "to", "`to` is empty"),
        ({"id": "number"}, "id", "`number` of the option `id` is not a column; the DataFrame has: order_id, line"),
        ({"id": "order_id, weight"}, "id", "`weight` of the option `id` has the type double"),
        ({"id": "tags"}, "id", "`tags` of the option `id` has the type map"),
        ({"body": "text"}, "body", "`text` of the option `body` is not a column"),
        ({"meta": "order_id"}, "meta", "must be a struct, a map, or text"),
        ({"priority": "urgent"}, "priority", "`urgent` .* nor is it now, next or low"),
        ({"priority": "order_id"}, "priority", "must be text"),
        ({"batch_size": "many"}, "batch_size", "`batch_size` is 'many': give a number of rows from 1 to"),
        ({"batch_size": "0"}, "batch_size", "a number of rows from 1 to"),
        ({"on_conflict": "FAIL"}, "on_conflict", "`on_conflict` is 'FAIL': give `fail`, or a directory"),
        ({"on_refused": " fail "}, "on_refused", "`on_refused` is ' fail ': give `fail`, or a directory"),
        ({"on_conflict": "ignore"}, "on_conflict", "`on_conflict` is 'ignore': give `fail`, or .* such as ./ignore"),
        ({"wait": "handled"}, "wait", "give `queued` or `accepted`"),
        ({"mesh": "demo"}, "mesh", "set `job` too"),
        ({"database_url": "postgresql://elsewhere"}, "database_url", "set `job` too"),
        ({"idd": "order_id"}, "idd", "the sink has no option `idd`; it has to, to_column, id"),
        ({"path": "/orders"}, "path", "no option `path`"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(options: dict[str, str], field: str | None, sentence: str) -> None:
    with pytest.raises(InvalidMessage, match=sentence) as caught:
        plan_write(ENOUGH | options, schema())
    assert caught.value.problem.field == field


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("mesh", "set POSTROOM_MESH, or the option `mesh`"),
        ("database_url", "set POSTROOM_DATABASE_URL, or the option database_url"),
    ],
)
def test_a_job_needs_a_mesh_and_a_database(missing: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POSTROOM_MESH", "POSTROOM_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    given = {name: text for name, text in JOB.items() if name != missing}
    with pytest.raises(InvalidMessage, match=sentence) as caught:
        plan_write(ENOUGH | given, schema())
    assert caught.value.problem.field == missing


@pytest.mark.parametrize("text", ["null", "nightly", "17"])
def test_the_id_of_a_job_is_a_uuid(text: str) -> None:
    with pytest.raises(InvalidMessage, match=f"`job` is '{text}': choose a UUID") as caught:
        plan_write(ENOUGH | JOB | {"job": text}, schema())
    assert caught.value.problem.field == "job"


def test_the_database_of_the_environment_does_not_go_to_the_executors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSTROOM_DATABASE_URL", "postgresql://alice:secret@host/postroom")
    plan = plan_write(ENOUGH | {"job": JOB["job"], "mesh": "demo"}, schema())
    assert b"secret" not in pickle.dumps(plan)


def test_a_write_without_a_destination_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="either `to`"):
        plan_write({"id": "order_id"}, schema())


@pytest.mark.parametrize(
    "kind",
    [
        DayTimeIntervalType(),
        ArrayType(DayTimeIntervalType()),
        StructType([StructField("took", DayTimeIntervalType())]),
        MapType(StringType(), DayTimeIntervalType()),
        MapType(DoubleType(), StringType()),
        MapType(StructType([]), StringType()),
    ],
)
def test_a_column_that_json_cannot_say_is_refused_unless_the_body_is_another(kind: DataType) -> None:
    with pytest.raises(InvalidMessage, match=r"`odd.*cast it"):
        plan_write(ENOUGH, schema(odd=kind))
    assert plan_write(ENOUGH | {"body": "line"}, schema(odd=kind)).options.body == "line"


def test_two_columns_of_one_name_are_refused() -> None:
    twice = StructType([StructField("order_id", LongType()), StructField("order_id", LongType())])
    with pytest.raises(InvalidMessage, match="more than one column `order_id`"):
        plan_write(ENOUGH, twice)


def test_a_report_that_cannot_be_written_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "write-1.jsonl").mkdir()
    problem = RowProblem(("17",), "", conflict=True, code="idempotency_key_reused", detail="it was used before")
    with pytest.raises(
        PostroomError, match=r"1 row not sent, and .*write-1\.jsonl cannot be written: .*Run the write again"
    ):
        write_problems(plan_write(ENOUGH, schema()), str(tmp_path), "write-1", [problem])
