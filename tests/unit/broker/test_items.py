"""Any bytes at all are either a message whose fingerprint holds, or a refusal: never another error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker import items
from broker.items import Checked, Item, Malformed, check, event, read_item, split
from postroom._wire.message import Envelope, check_envelope
from postroom.errors import InvalidMessage

LIMIT = 1000  # bytes of a body
BOTH_WAYS = pytest.mark.parametrize("divide", [split, items._one_by_one])
LONG = {"a": ["]", '",'], "b": "x" * 300_000}  # longer than what is passed over at once

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


@BOTH_WAYS
@given(st.binary() | json_values.map(encode) | st.lists(json_values).map(lambda values: encode({"messages": values})))
def test_any_body_is_a_batch_or_refused(divide: Callable[[bytes, int], Iterator[msgspec.Raw]], body: bytes) -> None:
    with suppress(InvalidMessage):
        found = [read_item(position, raw) for position, raw in enumerate(divide(body, 1000))]
        assert all(isinstance(item, (Item, Malformed)) for item in found)


@BOTH_WAYS
@given(
    st.lists(json_values | st.sampled_from([LONG, {"a": [{}, []], "b": '"]}, {'}]), min_size=1, max_size=4),
    st.sampled_from([None, 1]),
    st.sampled_from([b"", b" \r\n\t"]),
)
def test_a_batch_is_split_into_its_messages(
    divide: Callable[[bytes, int], Iterator[msgspec.Raw]], messages: list[Any], indent: int | None, space: bytes
) -> None:
    messages = json.loads(encode(messages))  # which has no infinity
    body = space + json.dumps({"messages": messages}, indent=indent).encode() + space

    assert [json.loads(bytes(raw)) for raw in divide(body, 4)] == messages


def test_what_only_begins_as_a_batch_is_refused() -> None:
    body = encode({"messages": [{"a": ["b", 1.5]}, {"c": LONG["a"][:2]}, {}]})
    wrong = [body[:end] for end in range(len(body))]
    wrong += [body + b"}", body[:-1] + b',"a":1}', body.replace(b"},{", b"}{"), body.replace(b"]}", b",]}"), b"\xff"]

    for each in wrong:
        with pytest.raises(InvalidMessage) as refused:
            list(split(each, 3))
        assert refused.value.code == "invalid_batch", each


def test_a_message_with_half_of_a_surrogate_pair_is_named() -> None:
    with pytest.raises(InvalidMessage, match=r"message 1: \\udfff is half of a surrogate pair"):
        list(split(rb'{"messages":[{"a":"\ud83d\ude00"},{"a":"\udfff"}]}', 3))
    with pytest.raises(InvalidMessage, match="message 0: JSON is malformed"):
        list(split(rb'{"messages":[{"a":x},{"a":"\ud800"}]}', 3))


@pytest.mark.parametrize("count", [4, 1001, 5000])
def test_messages_beyond_the_limit_are_refused(count: int) -> None:
    with pytest.raises(InvalidMessage) as refused:
        list(split(encode({"messages": [{}] * count}), 3))
    assert refused.value.code == "batch_too_large"


def test_a_message_is_found_before_the_next_one_is_looked_at() -> None:
    messages = split(b'{"messages":[{"a":1},' + b"[" * 3_000_000, 3)

    assert bytes(next(messages)) == b'{"a":1}'


def test_a_large_batch_is_never_split_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "_decode_request", lambda _: pytest.fail("all of it was decoded"))

    assert len(list(split(encode({"messages": [{"body": "x" * 100_000}] * 30}), 30))) == 30


@pytest.mark.parametrize(("value", "code"), [(b"1,", "meta_too_large"), (b"[", "too_deep")])
def test_a_message_of_too_many_values_is_refused_before_all_of_it_is_read(value: bytes, code: str) -> None:
    many = b'{"to":"topic:orders","meta":{"a":[' + value * 400_000

    with pytest.raises(InvalidMessage) as refused:
        next(split(b'{"messages":[' + many, 3))
    assert refused.value.code == code
    with pytest.raises(InvalidMessage) as refused:
        check(Item(0, "id-1", bytes(32), msgspec.Raw(many)), LIMIT)
    assert refused.value.code == code


ITEM = '{"client_message_id":"a","request_fingerprint":"' + "0" * 64 + '","message":{"to":"topic:orders","body":"a"}}'


@pytest.mark.parametrize("space", ["", " ", "\n"])
@pytest.mark.parametrize(("length", "code"), [(1, "duplicate_key"), (3_000_000, "invalid_batch")])
def test_a_second_list_of_messages_is_refused(space: str, length: int, code: str) -> None:
    messages = f'"messages"{space}:{space}[{json.dumps("a" * length)}]'
    with pytest.raises(InvalidMessage) as refused:
        list(split(f"{{{messages},{messages}{space}}}{space}".encode(), 9))
    assert refused.value.code == code


@pytest.mark.parametrize(
    "twice", ['"client_message_id":"b"', '"request_fingerprint":""', '"message":{}', '"message":[{"a":"b"}]']
)
def test_a_key_given_twice_beside_a_message_is_refused(twice: str) -> None:
    item = read_item(0, msgspec.Raw(f"{{{twice},{ITEM[1:]}".encode()))
    assert isinstance(item, Malformed)
    assert item.problem.code == "duplicate_key"
    assert twice.split('"')[1] in item.problem.detail


@pytest.mark.parametrize(("twice", "key"), [('"to":""', "to"), ('"body":"b"', "body"), ('"meta":{"a":1,"a":2}', "a")])
def test_a_key_given_twice_in_a_message_is_refused_once_its_id_was_looked_up(twice: str, key: str) -> None:
    item = read_item(0, msgspec.Raw(ITEM.replace('{"to"', f'{{{twice},"to"').encode()))
    assert isinstance(item, Item)
    fingerprint = check_envelope(msgspec.json.decode(item.message, type=Envelope)).fingerprint

    with pytest.raises(InvalidMessage) as refused:
        check(item._replace(fingerprint=fingerprint), LIMIT)
    assert (refused.value.code, refused.value.problem.field) == ("duplicate_key", key)


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
