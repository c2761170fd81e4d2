"""Dead letters: EVT-047-002, `MessageDeadLettered` (seed sds-047 §6; CMD-052; spec delivery.md).

A letter holds the whole message and why nobody could handle it. It is published, and confirmed, before the message is
acknowledged; its own message id is derived from the message's, so that a crash between the two makes no second letter
for as long as the stream's duplicate window lasts.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from nats.js import JetStreamContext
from nats.js.errors import NoStreamResponseError

from delivery.errors import NATS_ERRORS, from_nats
from delivery.message import MESSAGE_ID, Delivery, json_object
from delivery.settings import StreamSettings
from delivery.streams import dead_letter_stream, ensure_stream
from delivery.subjects import dead_letter_subject, parse_subject
from postroom.errors import InvalidMessage

EVENT_TYPE: Final = "MessageDeadLettered"
REPLAYED_FOR: Final = "Postroom-Replayed-For"  # the consumer that buried it: no other takes the replay
REPLAY_OF: Final = "Postroom-Replay-Of"  # the message id that it was first sent under
_IDEMPOTENCY_KEY: Final = "Idempotency-Key"
_UNKNOWN: Final = datetime.fromtimestamp(0, UTC)


class DeadLetter(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """The body of a dead letter. The payload is text where it is UTF-8, else base64.

    The first four members are the seed's event; a letter of another program may have no more than those.
    """

    message_id: str | None
    original_subject: str
    reason: str
    attempts: int
    last_error: str = ""
    stream: str = ""
    sequence: int = 0
    consumer: str = ""
    published_at: datetime = _UNKNOWN
    died_at: datetime = _UNKNOWN
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    tenant: str | None = None
    idempotency_key: str | None = None
    payload: str | None = None
    payload_base64: str | None = None

    def data(self) -> bytes:
        """Return the original payload, byte for byte."""
        if self.payload_base64 is not None:
            return base64.b64decode(self.payload_base64)
        return (self.payload or "").encode()


def now() -> datetime:
    """Return the wall clock."""
    return datetime.now(UTC)


class DeadLetters:
    """The dead letters of one context."""

    def __init__(
        self,
        js: JetStreamContext,
        context: str,
        *,
        stream: StreamSettings | None = None,
        clock: Callable[[], datetime] = now,
    ) -> None:
        """`stream` is declared where it is missing: the default `<CONTEXT>_DLQ` unless it is given."""
        self._js = js
        self._context = context
        self._stream = stream or dead_letter_stream(context)
        self._clock = clock

    async def publish(self, delivery: Delivery, *, reason: str, error: str, consumer: str) -> None:
        """Keep `delivery` for ever after; returns once JetStream has it. Raises `PostroomError` where it has not."""
        letter = self._letter(delivery, reason=reason, error=error, consumer=consumer)
        subject = dead_letter_subject(self._context, delivery.subject)
        headers = {MESSAGE_ID: letter_id(letter), "Postroom-Event-Type": EVENT_TYPE}
        body = msgspec.json.encode(letter)
        doing = f"keeping the dead letter of {letter.message_id or letter.sequence}"
        try:
            try:
                await self._js.publish(subject, body, stream=self._stream.name, headers=headers)
            except NoStreamResponseError:
                await ensure_stream(self._js, self._stream)
                await self._js.publish(subject, body, stream=self._stream.name, headers=headers)
        except NATS_ERRORS as refused:
            raise from_nats(refused, doing) from refused

    def _letter(self, delivery: Delivery, *, reason: str, error: str, consumer: str) -> DeadLetter:
        body = json_object(delivery.data)
        return DeadLetter(
            message_id=delivery.message_id,
            original_subject=delivery.subject,
            reason=reason,
            attempts=delivery.attempt,
            last_error=error,
            stream=delivery.stream,
            sequence=delivery.sequence,
            consumer=consumer,
            published_at=delivery.published_at,
            died_at=self._clock(),
            headers=dict(delivery.headers),
            tenant=_text(body.get("tenant")) or _context_of(delivery.subject),
            idempotency_key=_text(body.get("idempotency_key")) or delivery.headers.get(_IDEMPOTENCY_KEY),
            **_payload(delivery.data),
        )


def letter_id(letter: DeadLetter) -> str:
    """Derive a letter's message id: the same death of the same message at the same consumer has the same."""
    message = letter.message_id or f"{letter.stream}.{letter.sequence}.{letter.published_at.timestamp():.6f}"
    return f"dead:{letter.consumer}:{message}"


def _payload(data: bytes) -> dict[str, Any]:
    try:
        return {"payload": data.decode()}
    except UnicodeDecodeError:
        return {"payload_base64": base64.b64encode(data).decode()}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _context_of(subject: str) -> str | None:
    """Return the mesh that a message belongs to, where its subject says so."""
    try:
        parsed = parse_subject(subject)
    except InvalidMessage:
        return None
    return parsed.context
