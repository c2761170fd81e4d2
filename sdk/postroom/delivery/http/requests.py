"""What a handler receives: a delivered message as a request (docs/contract/delivery.md#delivery-41).

A message that cannot be made a request is `Malformed`: it goes to the dead letters, since no handler could ever see it.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from postroom._wire.accept import AcceptedEvent
from postroom._wire.cloudevents import META, STRUCTURED, VERSION, CloudEvent
from postroom._wire.message import Envelope
from postroom._wire.words import json_fault
from postroom.chassis.logs import clean
from postroom.delivery.message import IDEMPOTENCY_KEY, Delivery
from postroom.delivery.settings import HandlerFormat
from postroom.delivery.subjects import CommandSubject, EventSubject, InboxSubject, Subject, parse_subject
from postroom.errors import InvalidMessage
from postroom.handler import HandlerRequest
from postroom.signatures import SIGNATURE, sign, standard_headers

MESSAGE_ID: Final = re.compile(r"[!-~]{1,255}")  # the table has the same rule
_VERSION: Final = re.compile(r"[1-9][0-9]{0,8}")


class Malformed(Exception):
    """The message cannot be made a request; `reason` is the dead letter's reason, the text its error."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class Incoming(NamedTuple):
    """A delivered message that a handler can be called with; the first two say which message it is."""

    source_context: str
    message_id: str
    delivery: Delivery
    subject: Subject

    @property
    def causation_id(self) -> str | None:
        """The id of the message that caused it, where the header has a valid one."""
        cause = self.delivery.headers.get("X-Causation-Id", "")
        return cause if MESSAGE_ID.fullmatch(cause) else None


def read(delivery: Delivery) -> Incoming:
    """Check a delivered message; raises `Malformed`."""
    try:
        subject = parse_subject(delivery.subject)
    except InvalidMessage as error:
        raise Malformed("unknown_subject", str(error)) from error
    message_id = delivery.message_id
    if message_id is None:
        raise Malformed("no_message_id", "the message has no Nats-Msg-Id, and its payload no broker_message_id")
    if MESSAGE_ID.fullmatch(message_id) is None:
        raise Malformed("invalid_message_id", "the message id is not 1 to 255 visible ASCII characters")
    try:
        msgspec.json.decode(delivery.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = f"the payload is not JSON: {clean(json_fault(error, delivery.data))}"
        raise Malformed("invalid_payload", detail) from error
    return Incoming(subject.context, message_id, delivery, subject)


def body(incoming: Incoming, consumer: str) -> bytes:
    """Return the body of the request of a consumer; it contains the payload byte for byte."""
    delivery = incoming.delivery
    headers = delivery.headers
    request = HandlerRequest(
        message_id=incoming.message_id,
        subject=delivery.subject,
        event_type=_event_type(incoming.subject, headers),
        event_version=_event_version(incoming.subject, headers),
        occurred_at=delivery.occurred_at,
        correlation_id=_words(headers.get("X-Correlation-Id")),
        causation_id=_words(headers.get("X-Causation-Id")),
        consumer=consumer,
        payload=msgspec.Raw(delivery.data),
    )
    return msgspec.json.encode(request)


def headers(incoming: Incoming, attempt: int, last_error: str | None) -> dict[str, str]:
    """Return the request's headers without the signature."""
    made = {"Content-Type": "application/json", IDEMPOTENCY_KEY: incoming.message_id, "Postroom-Attempt": str(attempt)}
    if (traceparent := incoming.delivery.traceparent) is not None:
        made["traceparent"] = traceparent
    if last_error is not None:
        made["Postroom-Last-Error"] = clean(last_error).encode("ascii", "backslashreplace").decode()
    return made


def posted(
    incoming: Incoming, consumer: str, attempt: int, last_error: str | None, form: HandlerFormat
) -> tuple[bytes, dict[str, str]]:
    """Return the body and the headers of a request in the form that its handler wants, without the signature."""
    made = headers(incoming, attempt, last_error)
    if form == "postroom":
        return body(incoming, consumer), made
    event = cloudevent(incoming)
    if form == "cloudevents":
        return event.structured(), {**made, "Content-Type": STRUCTURED}
    return event.data or b"", {**made, "Content-Type": event.media, **event.headers()}


def cloudevent(incoming: Incoming) -> CloudEvent:
    """Return the CloudEvent that was sent, where the message came from one, else one made of what we know of it."""
    delivery = incoming.delivery
    try:
        envelope = msgspec.json.decode(msgspec.json.decode(delivery.data, type=AcceptedEvent).message, type=Envelope)
        attributes = (envelope.meta or {})[META]
        empty = envelope.body is None and envelope.body_base64 is None
        return CloudEvent.of(dict(attributes), None if empty else envelope.body_bytes())
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, InvalidMessage):  # another message, or a meta like it
        said = {
            "specversion": VERSION,
            "id": incoming.message_id,
            "source": f"urn:postroom:{incoming.source_context}",
            "type": _event_type(incoming.subject, delivery.headers),
            "subject": delivery.subject,
            "time": delivery.occurred_at.isoformat(),
            "eventversion": _event_version(incoming.subject, delivery.headers),
            "correlationid": _words(delivery.headers.get("X-Correlation-Id")),
            "causationid": _words(delivery.headers.get("X-Causation-Id")),
        }
        return CloudEvent.of({name: value for name, value in said.items() if value is not None}, delivery.data)


def signed(secret: bytes, message_id: str, body: bytes, at: int) -> dict[str, str]:
    """Return the headers that sign a request `at` a time (seconds since the epoch): ours, and Standard Webhooks'."""
    return {SIGNATURE: sign(secret, body, at), **standard_headers(secret, message_id, body, at)}


def _event_type(subject: Subject, headers: Mapping[str, str]) -> str:
    if isinstance(subject, EventSubject):
        return subject.name
    match subject:
        case CommandSubject():
            default = f"{subject.agent}.{subject.verb}"
        case InboxSubject():
            default = "message"
        case _:
            default = subject.name
    return _words(headers.get("Postroom-Event-Type")) or default


def _event_version(subject: Subject, headers: Mapping[str, str]) -> int:
    if isinstance(subject, EventSubject):
        return subject.version
    version = headers.get("X-Event-Version", "")
    return int(version) if _VERSION.fullmatch(version) else 1


def _words(text: str | None) -> str | None:
    return None if text is None else clean(text) or None
