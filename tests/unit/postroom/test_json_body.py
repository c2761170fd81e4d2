"""A dict or a list as a body is sent as JSON, the same text for the same value, and what is not JSON is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
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


@dataclass
class Order:
    number: int


class OrderOfMsgspec(msgspec.Struct):
    number: int


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


@pytest.mark.parametrize("body", [Order(17), OrderOfMsgspec(17)], ids=["dataclass", "struct"])
def test_a_body_of_a_class_says_how_it_becomes_a_dict(body: Any) -> None:
    client = FakeClient()
    with pytest.raises(InvalidMessage, match=r"msgspec\.to_builtins") as caught:
        client.send("topic:orders", body)
    assert (caught.value.code, client.sent) == ("invalid_field", [])
    client.send("topic:orders", msgspec.to_builtins(body))
    assert client.sent[0].json() == {"number": 17}


@pytest.mark.parametrize("payload", [object(), {"order": object()}], ids=["itself", "within"])
def test_a_payload_of_a_class_without_json_says_what_to_make_of_it(payload: Any) -> None:
    with pytest.raises(InvalidMessage, match=r"of type object is not JSON: make a dict or a text .* model_dump"):
        emit(None, "demo", "order_placed", payload, aggregate_type="order", aggregate_id=1)


def test_any_mapping_is_sent_as_a_dict_is() -> None:
    client = FakeClient()
    for of in (dict, MappingProxyType):
        client.send("topic:orders", of({"number": 17}), meta=of({"a": 1}), client_message_id="order-17")
    assert (client.sent[0].json(), client.sent[0].meta, len(client.sent)) == ({"number": 17}, {"a": 1}, 1)


TYPED = """
from typing import TypedDict

from postroom import AsyncClient, Client, SendRequest
from postroom.testing import FakeClient

Order = TypedDict("Order", {"number": int})
Meta = TypedDict("Meta", {"event_version": int})
order: Order = {"number": 17}
meta: Meta = {"event_version": 2}


async def send(post: AsyncClient, blocking: Client, fake: FakeClient) -> None:
    await post.send("topic:orders", order, meta=meta)
    blocking.send("topic:orders", [order], meta=meta)
    fake.send("topic:orders", {"order": order, "at": None})
    list(fake.send_many([SendRequest(to="topic:orders", meta=meta)]))
"""


def test_a_type_checker_takes_a_typed_dict_for_a_dict(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(TYPED)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "shop.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "Success: no issues found in 1 source file\n"), checked
