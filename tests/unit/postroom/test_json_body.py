"""A dict or a list as a body is sent as JSON, the same text for the same value, and what is not JSON is refused."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom import InvalidMessage
from postroom._wire.arguments import compose, encode, to_json
from postroom._wire.message import prepare
from postroom.testing import FakeAsyncClient, FakeClient
from postroom.transaction import emit

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(st.dictionaries(st.text(), VALUES, max_size=4) | st.lists(VALUES, max_size=4))
def test_what_arrives_is_the_same_json(value: Any) -> None:
    body = compose("topic:orders", value).body
    assert body is not None
    assert json.loads(body) == value


def test_the_order_of_keys_makes_no_other_message() -> None:
    one, other = (
        prepare(encode(compose("topic:orders", body, client_message_id="k")))
        for body in ({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1})
    )
    assert one.fingerprint == other.fingerprint


@pytest.mark.parametrize(
    "body",
    [
        {"at": datetime(2026, 11, 21, tzinfo=UTC)},
        {"total": Decimal("1.5")},
        {"share": float("nan")},
        [float("inf")],
        {17: "order"},
        {"pair": (1, 2)},
        {"kinds": {1, 2}},
        {"raw": b"bytes"},
        {1: "a", "b": 2},
    ],
    ids=str,
)
async def test_what_is_not_json_is_refused_with_what_to_pass(body: Any) -> None:
    client = FakeAsyncClient()
    with pytest.raises(InvalidMessage, match=r"cannot be written as JSON.*isoformat") as caught:
        await client.send("topic:orders", body)
    assert (caught.value.code, caught.value.problem.field) == ("body_not_json", "body")
    assert client.sent == []


@given(st.dictionaries(st.text(), VALUES, max_size=4) | VALUES)
def test_a_value_of_an_event_or_a_result_is_the_same_json(value: Any) -> None:
    assert json.loads(to_json(value)) == value


@pytest.mark.parametrize("value", [float("nan"), [1, float("inf")], {"a": {"b": -float("inf")}, "c": None}], ids=str)
def test_what_json_would_make_null_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(value)
    with pytest.raises(InvalidMessage, match="cannot be written as JSON"):
        emit(None, "demo", "order_placed", value, aggregate_type="order", aggregate_id=1)


def test_what_is_json_already_stays_as_it_is() -> None:
    assert to_json({"at": datetime(2026, 11, 21, tzinfo=UTC), "raw": msgspec.Raw(b'{"a":null}'), "no": None}) == (
        b'{"at":"2026-11-21T00:00:00Z","raw":{"a":null},"no":null}'
    )


def test_a_value_that_holds_itself_or_is_too_deep_is_refused() -> None:
    itself: list[Any] = []
    itself.append(itself)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for body in (itself, deep):
        with pytest.raises(InvalidMessage) as caught:
            FakeClient().send("topic:orders", body)
        assert caught.value.code == "body_not_json"
    while deep:  # Python would free it by recursion
        (deep,) = deep


@pytest.mark.parametrize("body", [17, 1.5, True, ("a",), {1, 2}, object()])
def test_any_other_body_is_refused(body: Any) -> None:
    with pytest.raises(InvalidMessage, match="a dict or a list to send as JSON"):
        FakeClient().send("topic:orders", body)
