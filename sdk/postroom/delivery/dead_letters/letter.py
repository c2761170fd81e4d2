"""What a dead letter is, and its row in Postgres (docs/contract/delivery.md#delivery-44).

A letter holds the whole message and why nobody could handle it. Its message id is derived from the message's, so that
the same death has one letter, however often a crash has it buried. The record holds what consumers, webhooks and jobs
buried, and what operators did with it.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import asyncpg
import msgspec

from postroom._wire.dead_letters import DeadLetter as DeadLetter  # noqa: PLC0414 - one of this module's words too
from postroom._wire.sql import load_queries
from postroom.chassis.postgres import UNREACHABLE, Pool
from postroom.delivery.errors import letter_not_kept
from postroom.delivery.message import Delivery, json_object
from postroom.delivery.subjects import dead_letter_subject, known_subject

QUERIES: Final = load_queries(__package__, "record.sql")
EVENT_TYPE: Final = "MessageDeadLettered"
EVENT_TYPE_HEADER: Final = "Postroom-Event-Type"
REPLAYED_FOR: Final = "Postroom-Replayed-For"  # the consumer that buried it: no other takes the replay
REPLAY_OF: Final = "Postroom-Replay-Of"  # the message id that it was first sent under
RECORDED: Final = "Postroom-Recorded"  # on a letter that is a row of a database, where operators settle it

_IDEMPOTENCY_KEY: Final = "Idempotency-Key"
_ID_CHARACTERS: Final = 255


class DeadLetters(Protocol):
    """Where one consumer's dead letters are kept."""

    async def keep(self, letter: DeadLetter) -> None:
        """Return once the letter cannot be lost any more; raises `PostroomError` where it can."""


class RecordedLetters:
    """Keeps the letters of one context as rows; a worker publishes them."""

    def __init__(self, pool: Pool, context: str) -> None:
        self._pool = pool
        self._context = context

    async def keep(self, letter: DeadLetter) -> None:
        """Commit the letter, unless the record has it."""
        try:
            await self._pool.execute(QUERIES["keep"], *columns(self._context, letter), letter.data())
        except (*UNREACHABLE, asyncpg.PostgresError) as error:
            raise letter_not_kept(letter.message_id or str(letter.sequence), error) from error


def letter_of(delivery: Delivery, *, reason: str, error: str, consumer: str) -> DeadLetter:
    """Write the letter of a message that `consumer` buries."""
    body, subject = json_object(delivery.data), known_subject(delivery.subject)
    headers = {_legible(name): _legible(text) for name, text in delivery.headers.items()}
    return DeadLetter(
        message_id=None if delivery.message_id is None else _legible(delivery.message_id),
        original_subject=_legible(delivery.subject),
        reason=reason,
        attempts=delivery.attempt,
        last_error=_legible(error),
        stream=delivery.stream,
        sequence=delivery.sequence,
        consumer=consumer,
        published_at=delivery.published_at,
        died_at=datetime.now(UTC),
        headers=headers,
        tenant=_text(body.get("tenant")) or (None if subject is None else subject.context),
        idempotency_key=_text(body.get("idempotency_key")) or headers.get(_IDEMPOTENCY_KEY),
    ).with_data(delivery.data)


def letter_id(letter: DeadLetter) -> str:
    """Derive a letter's message id: the same death of the same message at the same consumer has the same."""
    message = letter.message_id or f"{letter.stream}.{letter.sequence}.{letter.published_at.timestamp():.6f}"
    return printable_id(f"dead:{letter.consumer}:{message}")


def columns(context: str, letter: DeadLetter) -> tuple[object, ...]:
    """Return what a row says of a letter: context, id, subject, time, and the letter itself without its payload."""
    subject = dead_letter_subject(context, letter.original_subject)
    return context, letter_id(letter), subject, letter.died_at, msgspec.json.encode(letter.without_data())


def printable_id(identity: str) -> str:
    """Return an id as it is, or a digest of one that a header or a database may not hold."""
    if identity.isascii() and identity.isprintable() and len(identity) <= _ID_CHARACTERS:
        return identity
    return f"sha256:{hashlib.sha256(identity.encode(errors='replace')).hexdigest()}"


def is_dead_letter(delivery: Delivery) -> bool:
    """Tell whether a message is a dead letter itself, on its own subject or copied to another."""
    words = delivery.subject.split(".")
    on_its_subject = words[0] != "cmd" and words[1:2] == ["dlq"]
    return on_its_subject or delivery.headers.get(EVENT_TYPE_HEADER) == EVENT_TYPE


def _legible(text: str) -> str:
    """Return a text that JSON can hold: another program may have sent bytes that are no UTF-8."""
    return str(text).encode(errors="replace").decode()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
