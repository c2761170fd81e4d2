"""Between the wire and the envelope: a delivered message becomes an `Envelope`, an emitted one becomes headers.

The body of a message is its payload; everything else of the envelope travels in headers
(docs/contract/delivery.md#delivery-59). What a message does not say is derived from what it does say, never from a
clock or a random number, so that the same message gives the same envelope at every delivery.
"""

import hashlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import msgspec

from postroom._wire.message import read_traceparent
from postroom._wire.words import json_fault
from postroom.agent import EPOCH, Envelope
from postroom.delivery.dead_letters import REPLAY_OF
from postroom.delivery.message import CAUSATION_ID, IDEMPOTENCY_KEY, Delivery
from postroom.delivery.publication import identifying
from postroom.delivery.subjects import CommandSubject, EventSubject, known_subject
from postroom.errors import InvalidMessage

_MICROSECOND: Final = timedelta(microseconds=1)
_LATEST: Final = (datetime.max.replace(tzinfo=EPOCH.tzinfo) - EPOCH) // _MICROSECOND
TENANT: Final = "Postroom-Tenant"
WORKSPACE: Final = "Postroom-Workspace"
ACTOR: Final = "Postroom-Actor"
SOURCE: Final = "Postroom-Source"
ENTITY_ID: Final = "Postroom-Entity-Id"
EXPECTED_VERSION: Final = "Postroom-Expected-Version"
EVENT_TYPE: Final = "Postroom-Event-Type"
CORRELATION_ID: Final = "X-Correlation-Id"
EVENT_VERSION: Final = "X-Event-Version"
OCCURRED_AT: Final = "X-Occurred-At"
TRACEPARENT: Final = "traceparent"

_CHECKED: Final = frozenset({EVENT_VERSION, EXPECTED_VERSION, OCCURRED_AT})  # the headers whose value must have a form
_SAMPLED: Final = 1  # in the flags of a traceparent


def to_microseconds(moment: datetime) -> int:
    """Turn a time with an offset into µs since the epoch."""
    return (moment - EPOCH) // _MICROSECOND


def later(moment: datetime, ticks: int) -> datetime:
    """Return the time so many µs after another, at most the latest one."""
    return EPOCH + min(to_microseconds(moment) + ticks, _LATEST) * _MICROSECOND


class Scope(NamedTuple):
    """The tenant and the workspace that a message belongs to; None where it does not say."""

    tenant: str | None
    workspace: str | None


def scope_of(delivery: Delivery, own: Scope) -> Scope:
    """Return the message's scope: by its subject and its headers; a foreign one takes precedence."""
    subject = known_subject(delivery.subject)
    tenant = _foreign(own.tenant, subject and subject.context, delivery.headers.get(TENANT))
    by_subject = subject.workspace if isinstance(subject, CommandSubject) else None
    return Scope(tenant, _foreign(own.workspace, by_subject, delivery.headers.get(WORKSPACE)))


def received(delivery: Delivery, scope: Scope, tick: Callable[[], datetime]) -> Envelope:
    """Read a delivered message that has an id; `tick` returns the time of one without.

    Raises `InvalidMessage` where the body is not JSON or a header is not what it should be.
    """
    envelope = unread(delivery, scope, tick)
    try:
        payload = msgspec.json.decode(delivery.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        sentence = f"the body of {envelope.id} is not JSON: {json_fault(error, delivery.data)}"
        raise InvalidMessage.of("invalid_json", sentence) from error
    sender = payload.get("sender") if isinstance(payload, dict) else None
    actor = envelope.actor or (sender if isinstance(sender, str) else "")
    return msgspec.structs.replace(envelope, payload=payload, actor=actor)


def unread(delivery: Delivery, scope: Scope, tick: Callable[[], datetime]) -> Envelope:
    """Read everything but the body."""
    headers, message_id = delivery.headers, delivery.message_id or ""
    kind, version = delivery.subject.rpartition(".")[2], 1
    match known_subject(delivery.subject):
        case EventSubject(_, name, number):
            kind, version = name, number
        case CommandSubject(_, _, _, verb):
            kind = verb
    if (traceparent := read_traceparent(headers.get(TRACEPARENT))) is not None:
        _, trace_id, span_id, flags = traceparent.split("-")
    else:
        trace_id, span_id, flags = digest("trace", message_id)[:32], digest("span", message_id)[:16], "01"
    occurred_at = headers.get(OCCURRED_AT)
    try:
        moment = tick() if occurred_at is None else msgspec.convert(occurred_at, datetime).astimezone(UTC)
    except (msgspec.ValidationError, OverflowError) as error:
        detail = f"the header {OCCURRED_AT} is {occurred_at!r:.40}: it must be an RFC 3339 time with an offset"
        raise InvalidMessage.of("invalid_header", detail) from error
    return Envelope(
        actor=headers.get(ACTOR, ""),
        causation_id=headers.get(CAUSATION_ID),
        correlation_id=headers.get(CORRELATION_ID) or message_id,
        entity_id=headers.get(ENTITY_ID),
        expected_version=_number(headers.get(EXPECTED_VERSION), EXPECTED_VERSION),
        id=message_id,
        idempotency_key=idempotency_key(delivery),
        sampled=msgspec.UNSET if int(flags, 16) & _SAMPLED else False,
        schema_version=_number(headers.get(EVENT_VERSION), EVENT_VERSION) or version,
        source=headers.get(SOURCE) or delivery.stream,
        span_id=span_id,
        tenant=scope.tenant or "",
        trace_id=trace_id,
        ts=moment,
        type=headers.get(EVENT_TYPE) or kind,
        workspace=scope.workspace or "",
    )


def refused(delivery: Delivery, scope: Scope, tick: Callable[[], datetime]) -> Envelope:
    """Read a message that is refused for its scope, even if its headers are invalid."""
    try:
        return unread(delivery, scope, tick)
    except InvalidMessage:
        sensible = {name: text for name, text in delivery.headers.items() if name not in _CHECKED}
        return unread(delivery._replace(headers=sensible), scope, tick)


def idempotency_key(delivery: Delivery) -> str:
    """Return what two copies of one message have in common: its key, else the id that it was first sent under."""
    headers = delivery.headers
    return headers.get(IDEMPOTENCY_KEY) or headers.get(REPLAY_OF) or delivery.message_id or ""


def headers_of(envelope: Envelope, epoch: int = 0) -> dict[str, str]:
    """Return the headers that an emitted message travels with; each `epoch` has a message id of its own."""
    headers: dict[str, str | None] = {
        **identifying(envelope.id, epoch),
        ACTOR: envelope.actor,
        CAUSATION_ID: envelope.causation_id,
        CORRELATION_ID: envelope.correlation_id,
        ENTITY_ID: envelope.entity_id,
        EVENT_TYPE: envelope.type,
        EVENT_VERSION: str(envelope.schema_version),
        EXPECTED_VERSION: None if envelope.expected_version is None else str(envelope.expected_version),
        IDEMPOTENCY_KEY: envelope.idempotency_key,
        OCCURRED_AT: envelope.ts.isoformat().replace("+00:00", "Z"),
        SOURCE: envelope.source,
        TENANT: envelope.tenant,
        TRACEPARENT: f"00-{envelope.trace_id}-{envelope.span_id}-{'00' if envelope.sampled is False else '01'}",
        WORKSPACE: envelope.workspace,
    }
    return {name: value for name, value in headers.items() if value}


def digest(*words: object) -> str:
    """Return 64 hex digits that depend on the words alone: ids that a second run derives again."""
    return hashlib.sha256("\0".join(map(str, words)).encode()).hexdigest()


def _foreign(own: str | None, *said: str | None) -> str | None:
    return next((word for word in said if word is not None and word != own), own)


def _number(text: str | None, header: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 15):  # noqa: PLR2004 - what JSON holds exactly
        detail = f"the header {header} is {text!r:.40}: it must be a number of at most 15 digits"
        raise InvalidMessage.of("invalid_header", detail)
    return int(text)
