"""The options of the Spark sink: what is refused on the driver, before a row is sent, and with which sentence."""

from __future__ import annotations

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

from postroom import InvalidMessage
from postroom.spark.options import plan_write

COLUMNS: dict[str, DataType] = {
    "order_id": LongType(),
    "line": StringType(),
    "weight": DoubleType(),
    "photo": BinaryType(),
    "at": TimestampType(),
    "tags": MapType(StringType(), LongType()),
}
ENOUGH = {"to": "topic:orders", "id": "order_id"}


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in (COLUMNS | columns).items()])


def test_the_least_that_a_write_needs_is_a_destination_and_an_id() -> None:
    plan = plan_write(ENOUGH, schema())
    assert (plan.to, plan.ids, plan.priority, plan.wait, plan.namespace) == (
        "topic:orders",
        ("order_id",),
        "next",
        "queued",
        "topic:orders",
    )


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
        ({"id": "number"}, "id", "`number` of the option `id` is no column; the DataFrame has: order_id, line"),
        ({"id": "order_id, weight"}, "id", "`weight` of the option `id` has the type double"),
        ({"id": "tags"}, "id", "`tags` of the option `id` has the type map"),
        ({"body": "text"}, "body", "`text` of the option `body` is no column"),
        ({"meta": "order_id"}, "meta", "has to be a struct, a map, or text"),
        ({"priority": "urgent"}, "priority", "`urgent` .* nor is it now, next or low"),
        ({"priority": "order_id"}, "priority", "has to hold text"),
        ({"batch_size": "many"}, None, "batch_size"),
        ({"batch_size": "0"}, None, "`batch_size` is a number of rows from 1 to"),
        ({"wait": "handled"}, None, "wait"),
        ({"idd": "order_id"}, "idd", "the sink has no option `idd`; it has to, to_column, id"),
        ({"path": "/orders"}, "path", "no option `path`"),
    ],
)
def test_an_option_that_cannot_be_meant_is_refused(options: dict[str, str], field: str | None, sentence: str) -> None:
    with pytest.raises(InvalidMessage, match=sentence) as caught:
        plan_write(ENOUGH | options, schema())
    assert caught.value.problem.field == field


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
    assert plan_write(ENOUGH | {"body": "line"}, schema(odd=kind)).body == "line"


def test_two_columns_of_one_name_are_refused() -> None:
    twice = StructType([StructField("order_id", LongType()), StructField("order_id", LongType())])
    with pytest.raises(InvalidMessage, match="more than one column `order_id`"):
        plan_write(ENOUGH, twice)
