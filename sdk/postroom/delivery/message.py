"""One message as its readers see it: a delivery of JetStream, with the places of its id, or a row of the history."""

import base64
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import asyncpg
import msgspec
from nats.aio.msg import Msg

from postroom._wire.administration import HistoryMessage
from postroom._wire.canonical import decode
from postroom._wire.message import read_traceparent
from postroom.delivery.nats import UNREADABLE, UNREADABLE_SUBJECT
from postroom.retry_policy import RetryPolicy, policy_of

MESSAGE_ID: Final = "Nats-Msg-Id"
CAUSATION_ID: Final = "X-Causation-Id"
IDEMPOTENCY_KEY: Final = "Idempotency-Key"
EPOCH: Final = "Postroom-Epoch"  # how often a message was published again, where it was: its id then ends with that
FIRST_PUBLISHED_AT: Final = "Postroom-First-Published-At"  # on the replay of a message
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_PLAIN_WORDS: Final = 9  # of an ack subject without a domain
_NANOSECONDS: Final = 1_000_000_000


class Delivery(NamedTuple):
    """A message that JetStream delivered to a durable consumer; immutable."""

    subject: str
    data: bytes
    headers: Mapping[str, str]
    message_id: str | None  # what inboxes dedupe by; None where the message carries none
    stream: str
    sequence: int  # in the stream
    attempt: int  # as the server counts deliveries, 1 for the first; handlers count what was attempted
    published_at: datetime
    retry_policy: RetryPolicy | None = None  # the sender's
    consumer_sequence: int = 0  # among the deliveries of its consumer, each attempt counted

    @property
    def unreadable(self) -> str | None:
        """Which part of the message could not be read; None where it can be handled."""
        if UNREADABLE in self.headers:
            return "its headers are not NATS headers in UTF-8: the letter has them in base64"
        if UNREADABLE_SUBJECT in self.headers:
            return "its subject is not UTF-8: the letter has it in base64"
        return None

    @property
    def occurred_at(self) -> datetime:
        """When it happened, as its publisher says; else when it was published, and not when it was replayed."""
        for name in ("X-Occurred-At", FIRST_PUBLISHED_AT):
            with suppress(msgspec.ValidationError):
                if (moment := msgspec.convert(self.headers.get(name), datetime)).tzinfo is not None:
                    return moment
        return self.published_at

    @property
    def traceparent(self) -> str | None:
        """The trace that it belongs to; None for a header that is not valid W3C Trace Context."""
        return read_traceparent(self.headers.get("traceparent"))

    def most_attempts(self, max_deliver: int) -> int:
        """Return how many attempts there are at a consumer that allows `max_deliver`."""
        return max_deliver if self.retry_policy is None else self.retry_policy.most_attempts(max_deliver)


class _Body(msgspec.Struct):
    broker_message_id: str | None = None


_decode_body: Final = msgspec.json.Decoder(_Body).decode


def delivery_of(message: Msg) -> Delivery:
    """Read a message of a pull consumer: its ack subject holds its stream, its numbers and the count of deliveries."""
    words = message.reply.split(".")
    if len(words) > _PLAIN_WORDS:
        words = words[:2] + words[4:]  # a domain and an account's hash come before the stream
    headers = message.headers or _NO_HEADERS
    return Delivery(
        subject=message.subject,
        data=message.data,
        headers=headers,
        message_id=message_id_of(headers, message.data),
        stream=words[2],
        sequence=int(words[5]),
        attempt=int(words[4]),
        published_at=datetime.fromtimestamp(int(words[7]) / _NANOSECONDS, UTC),
        retry_policy=policy_of(message.data),
        consumer_sequence=int(words[6]),
    )


def message_id_of(headers: Mapping[str, str], data: bytes) -> str | None:
    """Return `Nats-Msg-Id` without the epoch of a redrive, else the broker's id in the body, else None.

    None too where the headers are unreadable. The epoch is cut off only where a header says that there is one, since
    ids of other programs may look the same.
    """
    if UNREADABLE in headers:
        return None
    message_id = headers.get(MESSAGE_ID, "")
    if EPOCH in headers:
        message_id = message_id.removesuffix(f"/{headers[EPOCH]}")
    if message_id:
        return message_id
    try:
        said = _decode_body(data).broker_message_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return said if said and said.isprintable() else None


def json_object(data: bytes) -> dict[str, Any]:
    """Return the body as a JSON object; an empty one where it is something else."""
    try:
        decoded = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def history_message(row: asyncpg.Record) -> HistoryMessage:
    """Build a committed message from a row of the view `mesh.message`: the same in the history and in an inbox."""
    body: bytes = row["body"]
    return HistoryMessage(
        history_id=row["history_id"],
        broker_message_id=str(row["broker_message_id"]),
        client_message_id=row["client_message_id"],
        mesh=row["mesh"],
        sender=row["sender"],
        to=f"{row['destination_kind']}:{row['destination_ref']}",
        destination_kind=row["destination_kind"],
        accepted_at=row["accepted_at"],
        request_fingerprint=row["request_fingerprint"].hex(),
        priority=row["priority"],
        body=body.decode() if row["body_is_text"] else None,
        body_base64=None if row["body_is_text"] else base64.b64encode(body).decode(),
        meta=None if row["meta"] is None else decode(row["meta"]),
        reply_to=row["reply_to"],
        traceparent=row["traceparent"],
    )
