"""A key that stands twice is found without reading the text a second time (`postroom._wire.message.decode_request`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom._wire import message
from postroom.errors import InvalidMessage

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from('\\"/'), max_size=12)
LONG = TEXT.map(lambda text: text + 256 * "x" + text)
META = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
SENDS = st.fixed_dictionaries(
    {"to": st.just("topic:orders")},
    optional={
        "body": TEXT | LONG,
        "meta": st.dictionaries(TEXT.filter(lambda key: key != "mentions"), META, max_size=4),
        "priority": st.sampled_from(["now", "next", "low"]),
        "mentions": st.lists(st.sampled_from(["bob", "carol"]), max_size=3),
        "client_message_id": st.just("k"),
        "reply_to": st.none() | st.just("r"),
        "not_before": st.just("2026-11-21T09:00:00Z"),
    },
)


@given(SENDS, st.booleans())
def test_what_json_writes_is_taken(fields: dict[str, Any], ascii_only: bool) -> None:  # noqa: FBT001
    data = json.dumps(fields, ensure_ascii=ascii_only).encode()
    assert message.decode_request(data).to == "topic:orders"


@given(SENDS, st.data())
def test_a_key_twice_is_refused_wherever_it_stands(fields: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(fields)
    key = data.draw(st.sampled_from(sorted(fields)))
    again = f"{{{json.dumps(key)}: {json.dumps(fields[key])}, {text[1:]}"
    with pytest.raises(InvalidMessage) as refusal:
        message.decode_request(again.encode())
    assert refusal.value.code == "duplicate_key"


@given(SENDS, st.data())
def test_a_key_twice_is_refused_where_nothing_else_is_longer_than_we_write_it(
    fields: dict[str, Any], data: st.DataObject
) -> None:
    key, least = data.draw(st.sampled_from([("to", ""), ("body", ""), ("body", None), ("reply_to", "")]))
    shortest = {name: value for name, value in {key: least, **fields}.items() if value is not None or name == key}
    text = json.dumps(shortest, separators=(",", ":"), ensure_ascii=False)
    with pytest.raises(InvalidMessage) as refusal:
        message.decode_request(f'{{"{key}":{json.dumps(least)},{text[1:]}'.encode())
    assert refusal.value.code == "duplicate_key"


@given(LONG, st.sampled_from(["", "\\", '"', '\\"']), st.data())
def test_a_key_twice_is_refused_where_the_body_stands_elsewhere_too(
    body: str, before: str, data: st.DataObject
) -> None:
    """What is left out as the body may be a key, or lie within another text, next to a backslash."""
    text = json.dumps(body)
    meta = data.draw(st.sampled_from([{before: body}, {before + text: 1}, {body: before}, {before: [text, body]}]))
    fields = {"meta": meta, "to": "topic:orders", "body": body}
    whole = json.dumps(fields, ensure_ascii=False)
    assert message.decode_request(whole.encode()).body == body
    with pytest.raises(InvalidMessage):
        message.decode_request(f'{{"to":"topic:a",{whole[1:]}'.encode())


@given(st.dictionaries(TEXT, META, min_size=1, max_size=4), st.data())
def test_a_key_of_meta_twice_is_refused(meta: dict[str, Any], data: st.DataObject) -> None:
    text = json.dumps(meta)
    key = data.draw(st.sampled_from(sorted(meta)))
    again = f'{{"to": "topic:orders", "meta": {{{json.dumps(key)}: 0, {text[1:]}}}'
    with pytest.raises(InvalidMessage) as refusal:
        message.decode_request(again.encode())
    assert refusal.value.code == "duplicate_key"


def test_the_usual_send_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[bytes] = []
    monkeypatch.setattr(message, "refuse_duplicate_keys", _note(read))
    body = json.dumps({"order": 7, "note": 'a "quoted" \\ word' + 256 * "x"})
    message.decode_request(json.dumps({"to": "topic:orders", "body": body, "meta": {"a": ["b", {"c": "d"}]}}).encode())
    assert read == []
    message.decode_request(b'{"to":"topic:orders","priority":"next"}')
    assert len(read) == 1


def _note(read: list[bytes]) -> Callable[[bytes], None]:
    return read.append
