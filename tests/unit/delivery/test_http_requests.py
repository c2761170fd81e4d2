"""A delivered message as a request, whatever headers it has."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import pytest

from postroom.delivery.http.requests import Malformed, body, headers, read
from postroom.delivery.message import Delivery
from postroom.handler import HandlerRequest

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def delivery(
    subject: str = "sea.event.tide.v2", data: bytes = b"[1]", message_id: str | None = "m-1", **named: str
) -> Delivery:
    return Delivery(subject, data, named, message_id, "SEA_EVENTS", 7, 1, published_at=NOW)


def request(subject: str = "sea.event.tide.v2", **named: str) -> HandlerRequest:
    return msgspec.json.decode(body(read(delivery(subject, **named)), "billing"), type=HandlerRequest)


def test_an_event_is_named_and_numbered_by_its_subject() -> None:
    made = request(**{"Postroom-Event-Type": "other", "X-Event-Version": "9"})

    assert (made.event_type, made.event_version, made.payload) == ("tide", 2, [1])


@pytest.mark.parametrize(
    ("subject", "event_type"),
    [("cmd.sea.default.work.run", "work.run"), ("sea.inbox.ann", "message"), ("sea.dlq.tide.v1", "tide")],
)
def test_what_is_no_event_is_named_by_its_header_or_by_its_subject(subject: str, event_type: str) -> None:
    assert request(subject).event_type == event_type
    named = request(subject, **{"Postroom-Event-Type": "given", "X-Event-Version": "3"})
    assert (named.event_type, named.event_version) == ("given", 3)


@pytest.mark.parametrize("said", ["", "yesterday", "2025-12-28T22:00:00", "12"])
def test_a_time_that_is_none_is_the_publishing(said: str) -> None:
    assert request(**{"X-Occurred-At": said}).occurred_at == NOW


@pytest.mark.parametrize("trace", ["", "nonsense", "00-xyz-1-01", "00-" + "0" * 32 + "-" + "1" * 16 + "-01\r\nEvil: 1"])
def test_a_trace_that_is_none_is_not_passed_on(trace: str) -> None:
    assert "traceparent" not in headers(read(delivery(traceparent=trace)), 1, None)


def test_the_last_error_is_fit_for_a_header() -> None:
    made = headers(read(delivery()), 2, "http_500: é\r\nEvil: 1")

    assert made["Postroom-Last-Error"] == "http_500: \\xe9 Evil: 1"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (delivery(subject="nonsense"), "unknown_subject"),
        (delivery(message_id=None), "no_message_id"),
        (delivery(message_id="é"), "invalid_message_id"),
        (delivery(message_id="x" * 256), "invalid_message_id"),
        (delivery(data=b""), "invalid_payload"),
        (delivery(data=b"{"), "invalid_payload"),
        (delivery(data=b'"\xff"'), "invalid_payload"),
        (delivery(data=b"[" * 100_000), "invalid_payload"),
    ],
)
def test_what_makes_no_request_says_why(bad: Delivery, reason: str) -> None:
    with pytest.raises(Malformed) as refused:
        read(bad)
    assert refused.value.reason == reason
