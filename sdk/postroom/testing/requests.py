"""`handler_request`: the request of a consumer to a handler, made by the consumer's own code.

    request = handler_request({"order": 17}, event="order_paid", secret=SECRET)
    response = web.post("/handle", content=request.body, headers=request.headers)

For a message that a program sent, it is the request that its handler would get: `handler_request(post.sent[0])`.
"""

import time
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, get_args
from uuid import UUID, uuid4

import msgspec

from postroom._wire.accept import AcceptedEvent
from postroom._wire.arguments import event_json
from postroom._wire.message import parse_destination, refuse
from postroom.chassis.postgres import uuid_of
from postroom.delivery.http.requests import Malformed, posted, read, signed
from postroom.delivery.message import IDEMPOTENCY_KEY, MESSAGE_ID, Delivery
from postroom.delivery.settings import HandlerFormat
from postroom.delivery.subjects import event_subject, sent_subject
from postroom.testing.fake import Sent

_encode: Final = msgspec.json.Encoder().encode


class ConsumerRequest(NamedTuple):
    """The POST of a consumer: its body, and its headers without those that any HTTP client sets."""

    body: bytes
    headers: dict[str, str]

    @property
    def message_id(self) -> str:
        """The message's id, which is its `Idempotency-Key`: the same at every attempt."""
        return self.headers[IDEMPOTENCY_KEY]


def handler_request(
    message: Sent | Any,
    *,
    event: str | None = None,
    version: int = 1,
    subject: str | None = None,
    mesh: str = "demo",
    sender: str = "alice",
    consumer: str = "test",
    message_id: UUID | str | None = None,
    attempt: int = 1,
    last_error: str | None = None,
    occurred_at: datetime | None = None,
    correlation_id: UUID | str | None = None,
    causation_id: UUID | str | None = None,
    traceparent: str | None = None,
    secret: bytes | None = None,
    signed_at: int | None = None,
    form: HandlerFormat = "postroom",
) -> ConsumerRequest:
    """Return the request for a `Sent` message, or for an event of `mesh` whose payload (JSON) is `message`.

    An event is named by `event` and `version`, or by its whole `subject`. The request is signed where there is a
    `secret`, at `signed_at` (seconds since the epoch; now where that is not given). Another attempt at a message is
    another request with its `message_id`. `consumer` is the durable consumer that makes it, `form` its
    `handler.format`. Raises `InvalidMessage`.
    """
    message_id = str(message_id or uuid4())
    if form not in get_args(HandlerFormat):
        refuse("invalid_field", f"there is no form {form!r}: use {', '.join(get_args(HandlerFormat))}", "form")
    if type(attempt) is not int or attempt < 1:
        refuse("invalid_field", f"attempt must be a whole number, 1 or more, not {attempt!r}", "attempt")
    if occurred_at is not None and occurred_at.tzinfo is None:
        refuse("invalid_field", "occurred_at must be a time with its offset, as datetime.now(UTC)", "occurred_at")
    if isinstance(message, Sent):
        sent = published(message, mesh, sender, message_id)
        subject, data, said = subject or sent.subject, sent.data, sent.headers
    else:
        if subject is None:
            if event is None:
                refuse("invalid_subject", "name the event, as in event='order_paid', or give a subject", "event")
            subject = event_subject(mesh, event, version)
        data, said = event_json(message), {MESSAGE_ID: message_id}
    moment = occurred_at or datetime.now(UTC)
    given: dict[str, str | None] = {
        "X-Occurred-At": moment.isoformat(),
        "X-Correlation-Id": None if correlation_id is None else str(correlation_id),
        "X-Causation-Id": None if causation_id is None else str(causation_id),
        "traceparent": traceparent,
    }
    said |= {name: value for name, value in given.items() if value is not None}
    try:
        incoming = read(Delivery(subject, data, said, message_id, "TEST", 1, attempt, moment))
    except Malformed as error:
        refuse(error.reason, str(error))
    content, made = posted(incoming, consumer, attempt, last_error, form)
    if secret is not None:
        made |= signed(secret, message_id, content, int(time.time()) if signed_at is None else signed_at)
    return ConsumerRequest(content, made)


class Published(NamedTuple):
    """A send as a worker publishes it; its time is the caller's to say."""

    subject: str
    data: bytes
    headers: dict[str, str]


def published(sent: Sent, mesh: str, sender: str, message_id: str) -> Published:
    """Return what becomes of a send that the broker accepts under `message_id`; raises `InvalidMessage`."""
    kind, ref = parse_destination(sent.to)
    version = sent.meta.get("event_version", 1) if kind == "topic" else 1
    if type(version) is not int:
        refuse("invalid_event_version", "meta.event_version must be a whole number", "meta.event_version")
    subject = sent_subject(mesh, kind, ref, version)
    if subject is None:
        refuse("invalid_destination", f"{sent.to} goes to the inbox of a daemon, not to a handler", "to")
    event = AcceptedEvent(
        broker_message_id=message_id,
        client_message_id=sent.client_message_id,
        mesh=mesh,
        sender=sender,
        message=msgspec.Raw(_encode(sent.envelope)),
    )
    said = {
        MESSAGE_ID: message_id,
        "Postroom-Event-Type": ref,
        "X-Event-Version": str(version),
        "X-Correlation-Id": _uuid(sent.meta.get("correlation_id")),
        "X-Causation-Id": _uuid(sent.meta.get("causation_id")),
        "traceparent": sent.traceparent,
    }
    return Published(subject, _encode(event), {name: value for name, value in said.items() if value is not None})


def _uuid(text: Any) -> str | None:
    """Return the id that the broker keeps of a member of meta: only a UUID is one."""
    found = uuid_of(text)
    return None if found is None else str(found)
