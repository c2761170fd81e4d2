"""Reading server-sent events: nothing counts before the empty line that ends an event."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec
from support.inboxes import message

from postroom._wire.events import EventStream
from postroom._wire.retry import Patience
from postroom._wire.sends import EventsQuery, InboxMessage
from postroom._wire.transport import Peer, Transport


def following() -> EventStream:
    nobody: Any = None
    transport = Transport(nobody, "http://localhost", Peer("daemon", "here", "start one"), 1.0)
    return EventStream(transport, EventsQuery(), None, Patience(0))


def event(number: int) -> list[bytes]:
    received = datetime(2026, 11, 21, tzinfo=UTC)
    whole = InboxMessage(position=number, received_at=received, **msgspec.structs.asdict(message(number)))
    return [b"id: %d" % number, b"event: message", b"data: " + msgspec.json.encode(whole), b""]


def test_an_event_is_a_message_and_where_the_stream_has_come_to() -> None:
    stream = following()
    assert [each.position for each in stream._read([*event(5), *event(9)])] == [5, 9]
    assert stream._last_event_id == "9"


def test_an_event_that_breaks_off_does_not_count() -> None:
    stream = following()
    list(stream._read([*event(5), *event(9)[:-1]]))
    assert stream._last_event_id == "5"


def test_an_event_may_come_in_pieces() -> None:
    stream = following()
    found = [each.position for line in event(5) for each in stream._read([line])]
    assert found == [5]


def test_a_heartbeat_is_no_message_and_says_how_far_the_stream_has_come() -> None:
    stream = following()
    assert list(stream._read([b": still here", b"id: 7", b""])) == []
    assert stream._last_event_id == "7"
