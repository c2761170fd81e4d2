"""From Arrow batches to messages: ids that follow from the row alone, and what is refused with the row's key."""

from __future__ import annotations

import json
import re
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    LongType,
    NullType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from postroom import InvalidMessage, SendRequest
from postroom._wire.names import MESSAGE_ID
from postroom._wire.spark import SPARK_ID
from postroom.spark.options import plan_write
from postroom.spark.rows import RowIds, RowReader, id_text
from postroom.spark.sink import in_words_of_a_write
from postroom.testing import FakeClient

SCHEMA = StructType(
    [
        StructField("n", LongType()),
        StructField("text", StringType()),
        StructField("bytes", BinaryType()),
        StructField("to", StringType()),
    ]
)


def requests(rows: list[dict[str, Any]], **options: str) -> list[SendRequest]:
    columns = {
        "n": pa.array([row.get("n") for row in rows], pa.int64()),
        "text": pa.array([row.get("text") for row in rows], pa.string()),
        "bytes": pa.array([row.get("bytes") for row in rows], pa.binary()),
        "to": pa.array([row.get("to") for row in rows], pa.string()),
    }
    chosen = {"id": "n"} | ({} if "to_column" in options else {"to": "topic:orders"}) | options
    reader = RowReader(plan_write(chosen, SCHEMA))
    slices = list(reader.slices(pa.record_batch(columns)))
    assert all(len(rows) <= int(options.get("batch_size", 1000)) for rows in slices)
    return [row.request for rows in slices for row in rows]


def test_a_row_without_a_priority_is_next_and_an_empty_one_is_left_to_be_refused() -> None:
    sent = requests([{"n": 1}, {"n": 2, "text": ""}, {"n": 3, "text": "low"}], priority="text")
    assert [request.priority for request in sent] == ["next", "", "low"]


@given(st.lists(st.lists(st.text(max_size=140), min_size=2, max_size=2), min_size=2, max_size=2))
def test_two_keys_never_share_an_id_and_every_id_is_one(keys: list[list[str]]) -> None:
    one, other = (RowIds("namespace").id_of(key) for key in keys)
    assert (one == other) == (keys[0] == keys[1])
    assert MESSAGE_ID.allows(one)


@pytest.mark.parametrize(
    ("one", "other"), [(["a:b", "c"], ["a", "b:c"]), (["a", ""], ["", "a"]), ([":", ""], ["", ":"])]
)
def test_where_one_text_ends_and_the_next_begins_makes_a_difference(one: list[str], other: list[str]) -> None:
    assert RowIds("namespace").id_of(one) != RowIds("namespace").id_of(other)


def test_an_id_holds_the_key_where_it_can_be_read_and_another_namespace_makes_another() -> None:
    assert RowIds("topic:orders").id_of(["4711", "a"]).endswith(":4711:a")
    assert SPARK_ID.fullmatch(RowIds("topic:orders").id_of(["4711"]))
    assert SPARK_ID.fullmatch(RowIds("topic:orders").id_of(["é"]))
    assert RowIds("topic:orders").id_of(["4711"]) != RowIds("topic:returns").id_of(["4711"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (17, "17"),
        (True, "true"),
        (Decimal("1.50"), "1.50"),
        (Decimal("0E-18"), "0.000000000000000000"),
        (date(2026, 11, 21), "2026-11-21"),
        (datetime(2026, 11, 21, 9, tzinfo=UTC), "2026-11-21T09:00:00Z"),
        (datetime(2026, 11, 21, 10, tzinfo=timezone(timedelta(hours=1))), "2026-11-21T09:00:00Z"),
        (datetime(2026, 11, 21, 9), "2026-11-21T09:00:00"),  # noqa: DTZ001 - a TIMESTAMP_NTZ
    ],
)
def test_the_text_of_a_value_in_an_id_does_not_depend_on_the_session(value: Any, text: str) -> None:
    assert id_text(value) == text


def test_however_the_rows_are_cut_the_messages_are_the_same() -> None:
    rows = [{"n": number, "text": str(number)} for number in range(10)]
    assert requests(rows, batch_size="3") == requests(rows)


def test_a_body_column_is_sent_as_it_is_and_a_null_as_an_empty_body() -> None:
    rows = [{"n": 1, "text": "hello", "bytes": b"\0"}, {"n": 2}]
    assert [request.body for request in requests(rows, body="text")] == ["hello", None]
    assert [request.body_base64 for request in requests(rows, body="bytes")] == ["AA==", None]
    assert [request.body for request in requests(rows, body="n")] == ["1", "2"]


def test_without_a_body_column_the_body_is_the_whole_row() -> None:
    (request,) = requests([{"n": 1, "text": "hello"}])
    assert json.loads(request.body or "") == {"n": 1, "text": "hello", "bytes": None, "to": None}


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/New_York"])
@pytest.mark.parametrize("at", [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)])
def test_a_time_at_the_end_of_the_calendar_is_sent_in_whatever_zone_the_session_is(at: datetime, zone: str) -> None:
    schema = StructType().add("at", TimestampType()).add("all", ArrayType(TimestampType()))
    reader = RowReader(plan_write({"id": "at", "to": "topic:orders"}, schema))
    arrow = to_arrow_schema(schema, timezone=zone)
    batch = pa.RecordBatch.from_pylist([{"at": at, "all": [at, None]}], schema=arrow)

    ((row,),) = reader.slices(batch)
    text = at.replace(tzinfo=None).isoformat() + "Z"
    assert row.key == (text,)
    assert json.loads(row.request.body or "") == {"at": text, "all": [text, None]}


def test_arrays_of_nothing_are_empty() -> None:
    """Spark says of `array()` that it holds no null, and of its elements that they are nothing else."""
    nothing = ArrayType(NullType(), containsNull=False)
    schema = StructType().add("n", LongType()).add("all", nothing, nullable=False).add("held", ArrayType(nothing))
    batch = pa.RecordBatch.from_arrays(
        [pa.array([1]), pa.array([[]], pa.list_(pa.null())), pa.array([[[], None]], pa.list_(pa.list_(pa.null())))],
        names=["n", "all", "held"],
    )
    ((row,),) = RowReader(plan_write({"id": "n", "to": "topic:orders"}, schema)).slices(batch)
    assert json.loads(row.request.body or "") == {"n": 1, "all": [], "held": [[], None]}


def test_meta_may_be_text_with_an_object() -> None:
    rows = [{"n": 1, "text": '{"a": [1]}'}, {"n": 2}]
    assert [request.meta for request in requests(rows, meta="text", body="n")] == [{"a": [1]}, None]


def test_a_row_without_an_id_is_named_by_its_place_and_its_other_columns() -> None:
    rows = [{"n": 1}, {"n": 2}, {"n": None, "text": "pears" * 20, "to": "topic:a"}]
    with pytest.raises(InvalidMessage, match=r"It is row 3 of its partition, with text='pears.*s', to='topic:a'$"):
        requests(rows, batch_size="2")


@pytest.mark.parametrize(
    ("options", "row"),
    [({"id": "n"}, "row 3 of its partition, with n=3$"), ({"id": "day"}, "row 3 of its partition, with n=3$")],
)
def test_a_value_that_cannot_be_represented_is_named_with_its_row(options: dict[str, str], row: str) -> None:
    """Spark has days and times beyond those of Python, which makes the JSON."""
    schema = StructType([StructField("n", LongType()), StructField("day", DateType())])
    days = pa.array([0, 1, 4_000_000], pa.int32()).cast(pa.date32())
    reader = RowReader(plan_write({"to": "topic:orders", "batch_size": "2", **options}, schema))
    with pytest.raises(InvalidMessage, match=f"a value of the column `day` cannot be represented: .*It is in {row}"):
        list(reader.slices(pa.record_batch({"n": pa.array([1, 2, 3], pa.int64()), "day": days})))


def test_rows_that_cannot_be_sent_are_handed_over_and_the_others_are_not_held_up() -> None:
    refused: list[tuple[tuple[str, ...], str]] = []
    plan = plan_write({"id": "n", "to_column": "to", "on_refused": "/refused", "batch_size": "2"}, SCHEMA)
    reader = RowReader(plan, lambda key, error: refused.append((key, str(error))))
    columns: dict[str, list[Any]] = {"n": [1, 2, None, 4, 5], "to": ["a", None, "c", "d", "e"]}
    empty = dict.fromkeys(("text", "bytes"), [None] * 5)
    batch = pa.RecordBatch.from_pydict(columns | empty, to_arrow_schema(SCHEMA))

    assert [row.request.to for rows in reader.slices(batch) for row in rows] == ["a", "d", "e"]
    assert [key for key, _ in refused] == [("2",), ()]
    assert "its `to` is null" in refused[0][1]
    assert "It is row 3 of its partition, with to='c'" in refused[1][1]


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        ([{"n": 1}, {"n": None}], {}, "a row has no id: its `n`"),
        ([{"n": 1, "to": "topic:a"}, {"n": 2}], {"to_column": "to"}, "the row n=2 has no destination"),
        ([{"n": 1, "text": "[]"}], {"meta": "text"}, "`text` of the row n=1 is not a JSON object"),
        ([{"n": 1, "text": "{"}], {"meta": "text"}, "`text` of the row n=1 is not a JSON object"),
        ([{"n": 1, "text": '{"a":' * 10**5}], {"meta": "text"}, "`text` of the row n=1 is not a JSON object"),
        (
            [{"n": 1, "text": '{"a":{"b":1,"b":2}}'}],
            {"meta": "text"},
            "the row n=1 is not .*: the key 'b' is given twice",
        ),
    ],
)
def test_a_row_that_cannot_be_sent_is_named(rows: list[dict[str, Any]], options: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidMessage, match=sentence):
        requests(rows, **options)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"body": "a\0b"}, "body contains a NUL character: cast the column to binary"),
        ({"meta": {"mentions": ["bob"]}}, "meta.mentions is reserved: rename it"),
        ({"meta": {"n": 2**53 + 1}}, "meta cannot be fingerprinted .* exceeds .*; cast it to a string"),
    ],
)
def test_what_a_row_is_refused_for_names_the_remedy_of_a_write(message: dict[str, Any], sentence: str) -> None:
    with FakeClient() as post:
        (result,) = post.send_many([SendRequest(to="topic:orders", **message)])
    assert result.problem is not None
    assert re.fullmatch(sentence, in_words_of_a_write(result.problem))


def test_a_conflict_names_the_namespace_as_the_remedy() -> None:
    with FakeClient() as post:
        sends = (SendRequest(to="topic:orders", body=body, client_message_id="k") for body in "ab")
        *_, result = post.send_many(sends)
    assert result.problem is not None
    assert in_words_of_a_write(result.problem).endswith(
        "if it was another row of this write, name more columns in `id`; if one of another write, set a `namespace`"
    )
