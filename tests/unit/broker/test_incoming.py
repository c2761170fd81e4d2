"""Any bytes at all are either a message whose fingerprint holds, or a refusal: never another error."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.incoming import Checked, Item, Malformed, check, event, read_items
from postroom._wire.message import Envelope, check_envelope
from postroom.errors import InvalidMessage

LIMIT = 1000  # bytes of a body

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
fields = st.fixed_dictionaries(
    {"to": st.sampled_from(["topic:orders", "dm:bob", "queue:a.b", "topic:", "x"]) | st.text()},
    optional={
        "body": st.text() | json_values,
        "body_base64": st.just("AAEC") | st.text(),
        "meta": st.dictionaries(st.sampled_from(["mentions", "event_version", "a"]), json_values) | json_values,
        "priority": st.sampled_from(["now", "next", "low", "never"]),
        "reply_to": st.text(),
        "traceparent": st.text(),
    },
)


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value)


def item_of(message: Any, fingerprint: bytes = bytes(32)) -> Item:
    return Item(0, "id-1", fingerprint, msgspec.Raw(encode(message)))


@given(st.binary() | json_values.map(encode) | st.lists(json_values).map(lambda items: encode({"messages": items})))
def test_any_body_is_a_batch_or_refused(body: bytes) -> None:
    with suppress(InvalidMessage):
        items = read_items(body, 1000)
        assert [item.position for item in items] == list(range(len(items)))
        assert all(isinstance(item, (Item, Malformed)) for item in items)


@given(fields)
def test_any_message_is_checked_or_refused(message: dict[str, Any]) -> None:
    try:
        envelope = msgspec.convert(message, Envelope)
        fingerprint = check_envelope(envelope).fingerprint
    except (msgspec.ValidationError, InvalidMessage):
        fingerprint = bytes(32)
    with suppress(InvalidMessage):
        assert check(item_of(message, fingerprint), LIMIT).body == envelope.body_bytes()


def test_a_message_of_another_fingerprint_is_refused_with_both_prefixes() -> None:
    message = {"to": "topic:orders", "body": "hello"}
    computed = check_envelope(msgspec.convert(message, Envelope)).fingerprint

    with pytest.raises(InvalidMessage) as refused:
        check(item_of(message), LIMIT)
    assert refused.value.code == "fingerprint_mismatch"
    assert computed.hex()[:16] in refused.value.problem.detail
    assert computed.hex()[:17] not in refused.value.problem.detail


@pytest.mark.parametrize(("to", "announced"), [("topic:orders", True), ("queue:work", True), ("dm:bob", False)])
def test_topics_and_queues_are_announced_and_dms_are_not(to: str, *, announced: bool) -> None:
    message = {"to": to, "body": "hello"}
    item = item_of(message, check_envelope(msgspec.convert(message, Envelope)).fingerprint)
    checked: Checked = check(item, LIMIT)

    assert (event(item, checked, "an id", "demo", "alice") is not None) == announced
