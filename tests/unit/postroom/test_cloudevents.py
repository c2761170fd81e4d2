"""CloudEvents, with the library of the standard's authors as the other side: read, written, and the same event."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_http, to_binary, to_structured
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st

from postroom import InvalidMessage
from postroom._wire.arguments import encode
from postroom._wire.cloudevents import META, STRUCTURED, read_event
from postroom._wire.message import prepare
from postroom.testing import FakeAsyncClient, FakeClient

MODES = [to_binary, to_structured]
WORDS = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=20)


def event(data: Any = None, **attributes: Any) -> CloudEvent:
    named = {"id": "17", "source": "/shop", "type": "com.example.order", **attributes}
    return CloudEvent(named, {"order": 17} if data is None else data)


@pytest.mark.parametrize("mode", MODES)
@given(id_=WORDS, source=WORDS, subject=WORDS, extension=WORDS)
def test_what_the_library_writes_is_read_and_written_as_the_same_event(
    mode: Any, *, id_: str, source: str, subject: str, extension: str
) -> None:
    sent = event(
        id=id_, source=source, subject=subject, shop=extension, time=datetime(2026, 11, 21, 5, 9, 44, 428459, UTC),
        datacontenttype="application/json",
    )  # fmt: skip
    written = mode(sent, JSONFormat())
    read = read_event(written.headers, written.body)

    assert read.data is not None
    structured = HTTPMessage({"content-type": STRUCTURED}, read.structured())
    binary = HTTPMessage({"content-type": read.media, **read.headers()}, read.data)
    for message in (structured, binary):
        back = from_http(message, JSONFormat(), CloudEvent)
        assert (back.get_attributes(), back.get_data()) == (sent.get_attributes(), sent.get_data())


@pytest.mark.parametrize(
    ("data", "media"),
    [
        ({"order": 17}, "application/json"),
        ("plain words", "text/plain"),
        (b"\0\xff", "application/octet-stream"),
        ({"order": 17}, "application/vnd.shop+json"),
    ],
)
def test_data_of_any_kind_is_the_body_in_either_mode(data: Any, media: str) -> None:
    sent = event(data, datacontenttype=media)
    binary, structured = (mode(sent, JSONFormat()) for mode in MODES)
    prepared = [
        prepare(encode(read_event(each.headers, each.body).message("topic:orders"))) for each in (binary, structured)
    ]
    post = FakeClient()
    for each in (binary, structured):
        post.send_cloudevent("topic:orders", each.headers, each.body)
    assert len(post.sent) == 1
    assert (post.sent[0].json() if isinstance(data, dict) else post.sent[0].body) in (data, str(data).encode())
    assert post.sent[0].meta[META]["datacontenttype"] == media
    assert len({send.client_message_id for send in prepared}) == 1


async def test_source_and_id_name_the_message_and_one_that_is_sent_twice_is_one() -> None:
    post = FakeAsyncClient()
    for mode, source, id_ in ((to_binary, "/a", "1"), (to_structured, "/a", "1"), (to_binary, "/b", "1")):
        written = mode(event(source=source, id=id_, time=datetime(2026, 11, 21, tzinfo=UTC)), JSONFormat())
        await post.send_cloudevent("topic:orders", written.headers, written.body)
    assert [sent.meta[META]["source"] for sent in post.sent] == ["/a", "/b"]


def test_an_event_without_data_has_no_body() -> None:
    headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/shop", "ce-type": "order_gone"}
    post = FakeClient()
    post.send_cloudevent("topic:orders", headers, b"")
    assert (post.sent[0].body, "datacontenttype" in post.sent[0].meta[META]) == (b"", False)
    members = json.loads(read_event(headers, b"").structured())
    assert members == {"specversion": "1.0", "id": "1", "source": "/shop", "type": "order_gone"}


GOOD = {"specversion": "1.0", "id": "1", "source": "/shop", "type": "order"}


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"specversion": "0.3"}, "unsupported_version"),
        ({"id": ""}, "invalid_field"),
        ({"id": None}, "invalid_field"),
        ({"source": 7}, "invalid_field"),
        ({"time": "yesterday"}, "invalid_field"),
        ({"time": "2026-11-21T05:09:44"}, "invalid_field"),
        ({"Shop": "x"}, "invalid_field"),
        ({"shop": [1]}, "invalid_field"),
        ({"shop": 1.5}, "invalid_field"),
        ({"shop": "a\r\nb"}, "invalid_field"),
        ({"data": 1, "data_base64": "AA=="}, "two_bodies"),
        ({"data_base64": "!"}, "invalid_base64"),
        ({"data_base64": 7}, "invalid_json"),
        ({"data": [1] * 20_000}, "event_too_large"),
    ],
    ids=str,
)
def test_what_is_no_event_is_refused_and_the_field_named(change: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidMessage) as error:
        read_event({"Content-Type": STRUCTURED}, json.dumps({**GOOD, **change}).encode())
    assert error.value.code == code


@pytest.mark.parametrize(
    ("headers", "body", "sentence"),
    [
        ({"Content-Type": "application/json"}, b"{}", "not a CloudEvent"),
        ({"Content-Type": "application/cloudevents-batch+json"}, b"[]", "each by itself"),
        ({"Content-Type": STRUCTURED}, b"[]", "one JSON object"),
        ({"Content-Type": STRUCTURED}, rb'{"data":"\ud800"}', "half of a surrogate pair"),
        ({"Content-Type": STRUCTURED}, b'{"id":"1","id":"2","specversion":"1.0","source":"s","type":"t"}', "twice"),
        ({**{f"ce-{name}": value for name, value in GOOD.items()}, "ce-id": "\ud800"}, b"", "half of a surrogate pair"),
        ({**{f"ce-{name}": value for name, value in GOOD.items()}, "ce-data": "x"}, b"", "'data' is not an attribute"),
        ({"ce-id": "%ff", "ce-specversion": "1.0"}, b"", "percent-encoded"),
        ({"ce-id": "1", "CE-ID": "2"}, b"", "given twice"),
        ({"ce-id": "1", "CE-ID": "1"}, b"", "given twice"),
        ({"Content-Type": f"{STRUCTURED}; charset=utf-16"}, json.dumps(GOOD).encode(), "in UTF-8"),
    ],
)
def test_what_no_event_can_be_in_is_refused(headers: dict[str, str], body: bytes, sentence: str) -> None:
    with pytest.raises(InvalidMessage, match=sentence):
        read_event(headers, body)


@pytest.mark.parametrize(
    ("headers", "body", "field"),
    [
        ([("ce-id", "1")], b"{}", "headers"),
        (None, b"{}", "headers"),
        ({"ce-id": 17}, b"{}", "headers"),
        ({b"ce-id": b"17"}, b"{}", "headers"),
        ({"ce-id": "1"}, '{"order": 17}', "body"),
        ({"ce-id": "1"}, {"order": 17}, "body"),
    ],
)
def test_headers_and_a_body_of_other_types_are_refused_before_anything_is_sent(
    headers: Any, body: Any, field: str
) -> None:
    """A body of text became JSON of it: other data than that of the event."""
    post = FakeClient()
    with pytest.raises(InvalidMessage, match=r"must be a mapping of text|must be bytes") as caught:
        post.send_cloudevent("topic:orders", headers, body)
    assert (caught.value.problem.field, post.sent) == (field, [])


@pytest.mark.parametrize("body", [bytearray(b"17"), memoryview(b"17")])
def test_bytes_of_any_kind_are_the_data(body: Any) -> None:
    post = FakeClient()
    post.send_cloudevent("topic:orders", {f"ce-{name}": value for name, value in GOOD.items()}, body)
    assert post.sent[0].body == b"17"
