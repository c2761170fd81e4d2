"""What a message says to the engine of a flow."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from postroom.delivery.message import Delivery
from postroom.errors import InvalidMessage
from postroom.ledger.primitives import Answer
from postroom.worker.jobs import Answering, Due, answer_of, read

ACTIVITY, REQUEST = uuid4(), UUID("6fa459ea-ee8a-3ca4-894e-db77e160355e")  # a name of cases is the same in each process
OWN: dict[str, Any] = {"job": str(uuid4()), "activity": str(ACTIVITY), "flow": "export", "name": "load"}


def delivery(event: str, body: Any, **headers: str) -> Delivery:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    subject = event if "." in event else f"sea.event.{event}.v1"
    return Delivery(subject, data, named, "m-1", "SEA_EVENTS", 1, 1, published_at=datetime.now(UTC))


def test_the_engines_own_events_name_the_activity_and_what_is_due() -> None:
    assert read(delivery("activity_spawned", OWN)) == Due(ACTIVITY, "load", "export", "m-1")
    cycled = read(delivery("activity_cycled", {**OWN, "request": {"page": 2}}))
    assert cycled == Due(ACTIVITY, "load", "export", "m-1", Answer('{"page":2}'))
    retried = read(delivery("activity_retried", {**OWN, "guid": "m-0", "answer": [1], "request": str(REQUEST)}))
    assert retried == Due(ACTIVITY, "load", "export", "m-0", Answer("[1]", REQUEST))


def test_a_message_that_was_set_aside_comes_again_as_itself() -> None:
    assert read(delivery("activity_spawned", {**OWN, "guid": "m-0"})) == Due(ACTIVITY, "load", "export", "m-0")
    answer = {"guid": "m-0", "answer": 1, "request": str(REQUEST), "event": "extracted"}
    again = read(delivery("activity_retried", {**OWN, **answer}))
    assert again == Due(ACTIVITY, "load", "export", "m-0", Answer("1", REQUEST, "extracted"))


def test_a_replay_is_the_message_that_it_replays() -> None:
    spawned = read(delivery("activity_spawned", OWN, Postroom_Replay_Of="m-0"))
    assert isinstance(spawned, Due)
    assert spawned.guid == "m-0"


@pytest.mark.parametrize("body", [b"", b"[]", b'{"flow": "export"}', {**OWN, "activity": "none"}])
def test_an_engines_event_that_says_something_else_is_refused(body: Any) -> None:
    with pytest.raises(InvalidMessage, match="m-1 is not a valid activity_spawned"):
        read(delivery("activity_spawned", body))


@pytest.mark.parametrize("cause", [str(REQUEST), f"{REQUEST}/1", f"{REQUEST}~extract_consumer.1", REQUEST.hex])
def test_an_event_names_its_request_in_a_header_or_in_its_body(cause: str) -> None:
    expected = Answering(REQUEST, "sea", "extracted", "m-1")
    assert read(delivery("extracted", {"rows": 1}, X_Causation_Id=cause)) == expected
    assert read(delivery("extracted", {"answers": cause})) == expected


@pytest.mark.parametrize(
    "message",
    [
        delivery("extracted", {"rows": 1}),
        delivery("extracted", {"answers": 1}),
        delivery("extracted", b'not JSON: "answers"'),
        delivery("extracted", {}, X_Causation_Id="0123"),
        delivery("cmd.sea.default.work.run", {}, X_Causation_Id=str(REQUEST)),
        delivery("some.other.stream", {}, X_Causation_Id=str(REQUEST)),
    ],
)
def test_what_names_no_request_says_nothing(message: Delivery) -> None:
    assert read(message) is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"rows": 1}, '{"rows":1}'),
        ({"broker_message_id": "b", "message": {"to": "topic:extracted", "body": '{"rows": 1}'}}, '{"rows":1}'),
        ({"broker_message_id": "b", "message": {"to": "topic:extracted", "body": "a text"}}, '"a text"'),
    ],
)
def test_an_answer_is_a_body_or_what_was_sent(body: Any, said: str) -> None:
    assert answer_of(delivery("extracted", body), REQUEST, "extracted") == Answer(said, REQUEST, "extracted")


@pytest.mark.parametrize(("given", "kept"), [(f"00-{'a' * 32}-{'b' * 16}-01", True), ("nonsense", False)])
def test_an_answer_is_of_the_trace_that_its_header_names(given: str, *, kept: bool) -> None:
    message = delivery("extracted", {"rows": 1}, traceparent=given)
    assert answer_of(message, REQUEST, "extracted").traceparent == (given if kept else None)
    cycled = read(delivery("activity_cycled", {**OWN, "request": 1}, traceparent=given))
    assert isinstance(cycled, Due)
    assert cycled.answer.traceparent == (given if kept else None)


def test_an_answer_that_is_not_json_is_refused() -> None:
    for body, fault in ((b"not JSON", "malformed"), (b"[" * 100_000, "nested too deeply"), (b'"\xff"', "not UTF-8")):
        with pytest.raises(InvalidMessage, match=f"is not JSON: .*{fault}"):
            answer_of(delivery("extracted", body), UUID(int=1), "extracted")
