"""What a message says to the engine of a flow: which leg of which activity it moves on, or that it is none of its own.

activity_spawned                leg 1, in its body the activity, and the message where one is to come again
activity_cycled                 leg 2, in its body the activity and what it works on again
activity_retried                leg 2, in its body the activity and the message that is to come again
any event that names a request  leg 2: in `X-Causation-Id`, or in its body as `answers`, the request's message id
"""

from contextlib import suppress
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from postroom._wire.message import TRACEPARENT
from postroom.delivery.consumer import Delivery
from postroom.delivery.dead_letters.letter import REPLAY_OF
from postroom.delivery.subjects import EventSubject, parse_subject
from postroom.errors import InvalidMessage
from postroom.ledger.primitives import Answer

CAUSATION_ID: Final = "X-Causation-Id"
SPAWNED: Final = "activity_spawned"
CYCLED: Final = "activity_cycled"
RETRIED: Final = "activity_retried"

_PRESENT: Final = b'"answers"'


class _Body(msgspec.Struct):
    """The body of an engine's own event."""

    activity: UUID
    flow: str
    name: str
    request: Any = None
    guid: str | None = None
    answer: Any = None
    event: str | None = None


class _Answering(msgspec.Struct):
    answers: str | None = None


class _Sent(msgspec.Struct):
    body: str | None = None


class _Send(msgspec.Struct):
    """The body of an event that came from a send."""

    broker_message_id: str
    message: _Sent


class Spawned(NamedTuple):
    """Leg 1 is due."""

    activity: UUID
    name: str
    flow: str
    guid: str


class Due(NamedTuple):
    """Leg 2 is due."""

    activity: UUID
    name: str
    flow: str
    guid: str
    answer: Answer


class Answering(NamedTuple):
    """An event that names a request, which may be one of the flow's."""

    request: UUID
    event: str
    guid: str


Meaning = Spawned | Due | Answering | None

_decode_body: Final = msgspec.json.Decoder(_Body).decode
_decode_answering: Final = msgspec.json.Decoder(_Answering).decode
_decode_send: Final = msgspec.json.Decoder(_Send).decode
_decode: Final = msgspec.json.Decoder().decode


def read(delivery: Delivery) -> Meaning:
    """Tell what a message says; None: nothing to any flow.

    Raises `InvalidMessage` where it is an engine's own, and not what an engine writes.
    """
    guid = delivery.headers.get(REPLAY_OF) or delivery.message_id
    try:
        subject = parse_subject(delivery.subject)
    except InvalidMessage:  # it is another program's
        return None
    if guid is None or not isinstance(subject, EventSubject):
        return None
    event = subject.name
    if event in {SPAWNED, CYCLED, RETRIED}:
        return _own(event, guid, delivery)
    request = _uuid(delivery.headers.get(CAUSATION_ID))
    if request is None and _PRESENT in delivery.data:  # most events have no such member, and are not decoded for it
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            request = _uuid(_decode_answering(delivery.data).answers)
    return None if request is None else Answering(request, event, guid)


def answer_of(delivery: Delivery, request: UUID, event: str) -> Answer:
    """Return what `event` answers: its body, or what was sent where it came from a send; raises `InvalidMessage`.

    A send's text that is not JSON is handed on as a text.
    """
    try:
        said = msgspec.json.encode(_said(delivery.data)).decode()
        return Answer(said, request, event, _traceparent(delivery))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = f"the answer {delivery.message_id} to the request {request} is not JSON: {error}"
        raise InvalidMessage.of("invalid_answer", detail) from error


def _own(event: str, guid: str, delivery: Delivery) -> Spawned | Due:
    try:
        body = _decode_body(delivery.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage.of(
            "invalid_job_message", f"{delivery.message_id} is not a valid {event}: {error}"
        ) from error
    if event == SPAWNED:
        return Spawned(body.activity, body.name, body.flow, body.guid or guid)
    if event == CYCLED:
        return Due(body.activity, body.name, body.flow, guid, _answer(delivery, body.request))
    answer = _answer(delivery, body.answer, _uuid(body.request), body.event)
    return Due(body.activity, body.name, body.flow, body.guid or guid, answer)


def _answer(delivery: Delivery, said: Any, request: UUID | None = None, event: str | None = None) -> Answer:
    return Answer(msgspec.json.encode(said).decode(), request, event, _traceparent(delivery))


def _traceparent(delivery: Delivery) -> str | None:
    """Return the trace that a message is of; what is not as W3C Trace Context has it is none."""
    given = delivery.headers.get("traceparent", "")
    return given if TRACEPARENT.fullmatch(given) else None


def _said(data: bytes) -> Any:
    try:
        text = _decode_send(data).message.body
    except msgspec.ValidationError:
        return _decode(data)
    try:
        return None if text is None else _decode(text)
    except msgspec.DecodeError:
        return text


def _uuid(text: Any) -> UUID | None:
    """Return the request that a message id names, also where it was published again or replayed."""
    if not isinstance(text, str):
        return None
    try:
        return UUID(text.partition("~")[0].partition("/")[0])
    except ValueError:
        return None
