"""Counts, times and what is wrong with JSON, as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

import msgspec
import pytest

from postroom._wire.message import SendRequest
from postroom._wire.words import ago, counted, json_fault, shape_fault, span, when


class _Part(msgspec.Struct, forbid_unknown_fields=True):
    depth: int = 0
    level: Literal["low", "high"] = "low"


class _Whole(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(max_length=3)] = ""
    part: Annotated[_Part | None, msgspec.Meta(description="one")] = None
    parts: list[_Part] = []
    named: dict[str, _Part] = {}


@pytest.mark.parametrize(
    ("count", "words", "said"),
    [
        (0, ("message",), "0 messages"),
        (1, ("message",), "1 message"),
        (2_005, ("dead letter",), "2,005 dead letters"),
        (2, ("delivery",), "2 deliveries"),
        (1, ("delivery",), "1 delivery"),
        (3, ("key",), "3 keys"),
        (1, ("message waits", "messages wait"), "1 message waits"),
        (2, ("message waits", "messages wait"), "2 messages wait"),
    ],
)
def test_one_thing_is_not_several(count: int, words: tuple[str, ...], said: str) -> None:
    assert counted(count, *words) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.04, "40 ms"), (3.21, "3.2 s"), (45, "45 s"), (720, "12 min"), (18_000, "5 h"), (9e5, "10 d")],
)
def test_a_time_has_the_unit_that_people_would_use(seconds: float, said: str) -> None:
    assert span(seconds) == said


def test_a_moment_is_written_in_utc_wherever_it_was_said() -> None:
    assert when(datetime.fromisoformat("2026-01-31T13:00:04.7+01:00")) == "2026-01-31 12:00:04Z"


def test_what_has_yet_to_be_is_no_time_ago() -> None:
    assert [ago(None), ago(datetime.now(UTC) + timedelta(hours=1))] == [None, "0 ms"]
    assert ago(datetime.now(UTC) - timedelta(hours=5, minutes=1)) == "5 h"


@pytest.mark.parametrize(
    ("kind", "given", "field", "sentence"),
    [
        (_Whole, {"nme": ""}, "nme", "unknown field `nme`; did you mean `name`?"),
        (_Whole, {"x": 1}, "x", "unknown field `x`; the fields are name, part, parts, named"),
        (_Whole, {"part": {"depht": 1}}, "part", "part: unknown field `depht`; did you mean `depth`?"),
        (_Whole, {"parts": [{}, {"x": 1}]}, "parts[1]", "parts[1]: unknown field `x`; the fields are depth, level"),
        (
            _Whole,
            {"named": {"a": {"x": 1}}},
            "named[...]",
            "named[...]: unknown field `x`; the fields are depth, level",
        ),
        (_Whole, {"part": {"level": "mid"}}, "part.level", "part.level: Invalid enum value 'mid': one of high, low"),
        (_Whole, {"name": "four"}, "name", "name: Expected at most 3 characters"),
        (_Whole, {"name": 4}, "name", "name: Expected `str`, got `int`"),
        (_Whole | None, {"x": 1}, "x", "unknown field `x`; the fields are name, part, parts, named"),
        (SendRequest, {}, "to", "Object missing required field `to`"),
    ],
)
def test_a_fault_of_shape_says_what_could_be_there(kind: Any, given: Any, field: str, sentence: str) -> None:
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.convert(given, kind)
    assert shape_fault(refused.value, kind) == (field, sentence)


def test_json_that_is_not_utf_8_names_the_byte() -> None:
    data = b'{"a": "\xff"}'
    with pytest.raises(UnicodeDecodeError) as refused:
        msgspec.json.decode(data)
    assert json_fault(refused.value, data) == "0xff is not UTF-8 (byte 7)"


def test_json_that_nests_beyond_measure_is_said_to() -> None:
    deep = b"[" * 1_000_000
    with pytest.raises(RecursionError) as refused:
        msgspec.json.decode(deep)
    assert json_fault(refused.value, deep) == "it is nested too deeply"
