"""Dead letters: what could not be handled, kept whole, with the reason (docs/contract/delivery.md#delivery-44).

A letter holds the whole message and why it could not be handled. Its message id is derived from the message's, so that
one death has one letter, even where a crash has it buried twice. It is a row of a record before its message is
acknowledged: in Postgres for consumers, webhooks and jobs, in its event store for an agent. From there it is published,
and published again where its stream lost it, as events are. A daemon has no record of its own: its letters of what it
cannot read are in the stream only, where operators look for them too.
"""

import hashlib
import sys
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, Protocol

import msgspec
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NoStreamResponseError, NotFoundError

from postroom._wire.dead_letters import DeadLetter
from postroom._wire.sql import load_queries
from postroom.chassis.postgres import POSTGRES_ERRORS, Pool
from postroom.delivery.errors import letter_not_kept, mapped
from postroom.delivery.message import EPOCH, IDEMPOTENCY_KEY, MESSAGE_ID, Delivery, json_object, message_id_of
from postroom.delivery.nats import FROM_A_STREAM, api_subject, connection_of
from postroom.delivery.streams import dead_letter_stream, ensure_stream
from postroom.delivery.subjects import dead_letter_subject, known_subject, stream_name

QUERIES: Final = load_queries(__name__, "record.sql")
LETTER: Final = {"Postroom-Event-Type": "MessageDeadLettered"}  # the header that marks a letter
REPLAYED_FOR: Final = "Postroom-Replayed-For"  # the consumer that buried it: no other handles the replay
REPLAY_OF: Final = "Postroom-Replay-Of"  # the message id that it was first sent under
RECORDED: Final = "Postroom-Recorded"  # on a letter that has a row in a database, where operators settle it

_ID_CHARACTERS: Final = 255
_PAGE: Final = 200  # letters asked for at once
_SECONDS: Final = 5.0  # longest wait for a page of them
_HEADER_BYTES: Final = 2048  # of a letter, at most


class DeadLetters(Protocol):
    """Where one consumer's dead letters are kept."""

    async def keep(self, letter: DeadLetter) -> None:
        """Return once the letter is durable; raises `PostroomError` where it is not."""


class RecordedLetters:
    """Keeps the letters of one context as rows; a worker publishes them."""

    def __init__(self, pool: Pool, context: str) -> None:
        self._pool = pool
        self._context = context

    async def keep(self, letter: DeadLetter) -> None:
        """Commit the letter, unless the record has it."""
        try:
            await self._pool.execute(QUERIES["keep"], *columns(self._context, letter), letter.data())
        except POSTGRES_ERRORS as error:
            raise letter_not_kept(letter.message_id or str(letter.sequence), error) from error


class StreamLetters:
    """Keeps letters in the stream alone, for a program that has no record."""

    def __init__(self, js: JetStreamContext, context: str) -> None:
        """Keep them in `<CONTEXT>_DLQ`, which is declared where it is missing."""
        self._js = js
        self._context = context
        self._stream = dead_letter_stream(context)

    async def keep(self, letter: DeadLetter) -> None:
        """Publish the letter; one that is too large for NATS goes without its payload."""
        subject = dead_letter_subject(self._context, letter.original_subject)
        headers = {MESSAGE_ID: letter_id(letter), **LETTER}
        body = msgspec.json.encode(letter)
        if len(body) > connection_of(self._js).max_payload - _HEADER_BYTES:
            body = msgspec.json.encode(letter.shortened())
        with mapped(f"storing the dead letter of {letter.message_id or letter.sequence}"):
            try:
                await self._js.publish(subject, body, stream=self._stream.name, headers=headers)
            except NoStreamResponseError:
                await ensure_stream(self._js, self._stream, only=())  # an existing one is not ours to change
                await self._js.publish(subject, body, stream=self._stream.name, headers=headers)


def letter_of(delivery: Delivery, *, reason: str, error: str, consumer: str) -> DeadLetter:
    """Build the letter of a message that `consumer` buries."""
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
        idempotency_key=_text(body.get("idempotency_key")) or headers.get(IDEMPOTENCY_KEY),
    ).with_data(delivery.data)


def letter_id(letter: DeadLetter) -> str:
    """Derive a letter's message id: the same for every letter of the same message at the same consumer."""
    message = letter.message_id or f"{letter.stream}.{letter.sequence}.{letter.published_at.timestamp():.6f}"
    return printable_id(f"dead:{letter.consumer}:{message}")


def columns(context: str, letter: DeadLetter) -> tuple[object, ...]:
    """Return the columns of a letter: context, id, subject, time, and the letter itself without its payload."""
    subject = dead_letter_subject(context, letter.original_subject)
    return context, letter_id(letter), subject, letter.died_at, msgspec.json.encode(letter.without_data())


def printable_id(identity: str) -> str:
    """Return an id as it is, or a digest of one that a header or a database cannot hold."""
    if identity.isascii() and identity.isprintable() and len(identity) <= _ID_CHARACTERS:
        return identity
    return digest_id(identity)


def digest_id(identity: str) -> str:
    """Return an id of visible ASCII for any other."""
    return f"sha256:{hashlib.sha256(identity.encode(errors='replace')).hexdigest()}"


def is_dead_letter(delivery: Delivery) -> bool:
    """Return whether a message is a dead letter itself, on its own subject or copied to another."""
    words = delivery.subject.split(".")
    on_its_subject = words[0] != "cmd" and words[1:2] == ["dlq"]
    return on_its_subject or delivery.headers.items() >= LETTER.items()


def _legible(text: str) -> str:
    """Return a text that JSON can hold: another program may have sent bytes that are not UTF-8."""
    return str(text).encode(errors="replace").decode()


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


class StreamedLetter(NamedTuple):
    """A message in a stream of dead letters; `letter` is None where it is something else."""

    stream: str
    sequence: int
    letter_id: str
    letter: DeadLetter | None
    subject: str
    stored_at: datetime
    recorded: bool  # in some database


async def read_letters(
    js: JetStreamContext, context: str, begin: datetime | int, last: int = sys.maxsize
) -> AsyncGenerator[list[StreamedLetter], None]:
    """Yield what the stream of a context holds now from a time or a number on, up to one, oldest first, in pages.

    nats-py's `fetch` would take a message with a header `Status` for the server's own and drop it; a consumer of
    headers only would end at a block without headers (server 2.15). So neither is used.
    """
    name, connection = stream_name(context, "dlq"), connection_of(js)
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True, inactive_threshold=2 * _SECONDS)
    if isinstance(begin, datetime):
        config.deliver_policy, config.opt_start_time = DeliverPolicy.BY_START_TIME, begin
    else:
        config.deliver_policy, config.opt_start_seq = DeliverPolicy.BY_START_SEQUENCE, begin
    # a stream that is missing is created with the first letter
    with mapped(f"reading the dead letters of {context}"), suppress(NotFoundError):
        consumer = await js.add_consumer(name, config)  # the server forgets it by itself
        left = min(consumer.num_pending or 0, last - begin + 1 if isinstance(begin, int) else last)
        pages = await connection.subscribe(connection.new_inbox())
        try:
            while left:
                request, page = {"batch": min(_PAGE, left), "no_wait": True}, list[StreamedLetter]()
                asked = api_subject(js, f"CONSUMER.MSG.NEXT.{name}.{consumer.name}")
                await connection.publish(asked, msgspec.json.encode(request), reply=pages.subject)
                for _ in range(min(_PAGE, left)):
                    message = await pages.next_msg(timeout=_SECONDS)
                    left = 0
                    if not message.reply.startswith(FROM_A_STREAM):  # the rest was deleted meanwhile
                        break
                    if (number := message.metadata.sequence.stream) > last:
                        break
                    left = min(message.metadata.num_pending, last - number)
                    page.append(_read(message))
                yield page
        finally:
            await pages.unsubscribe()


def _read(message: Msg) -> StreamedLetter:
    found, headers = message.metadata, message.headers or {}
    stream, sequence = found.stream, found.sequence.stream
    try:
        letter = msgspec.json.decode(message.data, type=DeadLetter)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        letter = None
    if letter is not None and not letter.message_id and not letter.stream:
        # Another program's: it is known by its own place, so that two of them are not replayed as one message.
        letter = msgspec.structs.replace(letter, stream=stream, sequence=sequence)
    own = message_id_of({name: headers[name] for name in (MESSAGE_ID, EPOCH) if name in headers}, b"")
    return StreamedLetter(
        stream,
        sequence,
        printable_id(own or f"{stream}.{sequence}.{found.timestamp.timestamp():.6f}"),
        letter,
        message.subject,
        found.timestamp,
        RECORDED in headers,
    )


async def has_stream(js: JetStreamContext, context: str) -> bool:
    """Return whether a stream takes any subject of the context."""
    for subjects in (f"{context}.>", f"cmd.{context}.>"):
        with mapped(f"looking for the streams of {context}"), suppress(NotFoundError):
            await js.find_stream_name_by_subject(subjects)
            return True
    return False
