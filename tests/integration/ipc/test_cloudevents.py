"""The door for CloudEvents: what others post is a message on disk, once (docs/contract/send.md#send-107)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cloudevents.core.bindings.http import to_binary, to_structured
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from support.wire import encode, parse

from postroom._wire.message import Envelope

PATH = "/v1/cloudevents?to=topic:orders"
EVENT = CloudEvent({"id": "17", "source": "/shop", "type": "com.example.order", "shop": "é 1"}, {"order": 17})


GOOD = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "s", "ce-type": "t"}


async def post(room: Any, headers: dict[str, str], body: bytes, path: str = PATH) -> Any:
    named = {name.title() if name == "content-type" else name: value for name, value in headers.items()}
    return parse(await room.raw(encode("POST", path, body, named)))


async def test_an_event_in_either_mode_is_one_message(room: Any) -> None:
    binary, structured = to_binary(EVENT, JSONFormat()), to_structured(EVENT, JSONFormat())
    first = await post(room, binary.headers | {"content-type": "application/json"}, binary.body)
    assert first.status == 202, first.body
    row = await room.outbox.row(first.json["client_message_id"])
    (claimed,) = await room.outbox.claim()
    envelope = msgspec.json.decode(claimed.payload, type=Envelope)
    assert (claimed.client_message_id, row.destination) == (first.json["client_message_id"], "topic:orders")
    assert msgspec.json.decode(envelope.body_bytes()) == {"order": 17}
    assert envelope.meta is not None
    assert envelope.meta["cloudevent"]["shop"] == "é 1"

    again = await post(room, binary.headers | {"content-type": "application/json"}, binary.body)
    assert (again.status, again.json["duplicate"]) == (202, True)
    assert (await post(room, structured.headers, structured.body)).json["client_message_id"] == row.client_message_id
    assert await room.rows() == 1


async def test_an_event_has_the_id_and_the_trace_of_its_request(room: Any) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = await post(room, {**GOOD, "Idempotency-Key": "mine", "traceparent": trace}, b"")
    assert sent.json["client_message_id"] == "mine"
    (claimed,) = await room.outbox.claim()
    assert msgspec.json.decode(claimed.payload, type=Envelope).traceparent == trace
    other = await post(room, {**GOOD, "ce-id": "2", "Idempotency-Key": "mine"}, b"")
    assert (other.status, other.json["conflict"]) == (409, "outbox_inflight_fingerprint_mismatch")


@pytest.mark.parametrize(
    ("path", "headers", "body", "status"),
    [
        ("/v1/cloudevents", GOOD, b"", 400),
        (PATH, {"Content-Type": "application/json"}, b"{}", 415),
        (PATH, {"Content-Type": "application/cloudevents+json"}, b"{}", 400),
        (PATH, {"Content-Type": "application/cloudevents+json", "Content-Encoding": "gzip"}, b"{}", 415),
        (
            "/v1/cloudevents?to=nowhere",
            GOOD,
            b"",
            400,
        ),
    ],
)
async def test_anything_else_is_refused(
    room: Any, *, path: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    reply = await post(room, headers, body, path)
    assert reply.status == status, reply.body
    assert await room.rows() == 0
