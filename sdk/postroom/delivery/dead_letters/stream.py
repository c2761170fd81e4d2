"""The stream of a context's dead letters: for those who have no record, and for operators who look for such letters."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NoStreamResponseError, NotFoundError

from postroom.delivery.dead_letters.letter import (
    EVENT_TYPE,
    EVENT_TYPE_HEADER,
    RECORDED,
    DeadLetter,
    letter_id,
    printable_id,
)
from postroom.delivery.errors import NATS_ERRORS, from_nats, no_streams
from postroom.delivery.message import EPOCH, MESSAGE_ID, message_id_of
from postroom.delivery.nats import api_subject, connection_of
from postroom.delivery.streams import dead_letter_stream, ensure_stream
from postroom.delivery.subjects import dead_letter_subject, stream_name

_PAGE: Final = 200  # letters asked for at once
_SECONDS: Final = 5.0  # longest wait for a page of them
_HEADER_BYTES: Final = 2048  # of a letter, at most


class StreamLetters:
    """Keeps letters in the stream alone, for a program that has no record."""

    def __init__(self, js: JetStreamContext, context: str) -> None:
        """Keep them in `<CONTEXT>_DLQ`, which is declared where it is missing."""
        self._js = js
        self._context = context
        self._stream = dead_letter_stream(context)

    async def keep(self, letter: DeadLetter) -> None:
        """Publish the letter; one that is larger than NATS takes goes without its payload."""
        subject = dead_letter_subject(self._context, letter.original_subject)
        headers = {MESSAGE_ID: letter_id(letter), EVENT_TYPE_HEADER: EVENT_TYPE}
        body = msgspec.json.encode(letter)
        if len(body) > connection_of(self._js).max_payload - _HEADER_BYTES:
            body = msgspec.json.encode(letter.shortened())
        doing = f"storing the dead letter of {letter.message_id or letter.sequence}"
        try:
            try:
                await self._js.publish(subject, body, stream=self._stream.name, headers=headers)
            except NoStreamResponseError:
                await ensure_stream(self._js, self._stream, only=())  # an existing one is not ours to change
                await self._js.publish(subject, body, stream=self._stream.name, headers=headers)
        except NATS_ERRORS as refused:
            raise from_nats(refused, doing) from refused


class StreamedLetter(NamedTuple):
    """What lies in a stream of dead letters; `letter` is None where something else does."""

    stream: str
    sequence: int
    letter_id: str
    letter: DeadLetter | None
    subject: str
    stored_at: datetime
    recorded: bool  # in some database


async def read_letters(
    js: JetStreamContext, context: str, begin: datetime | int
) -> AsyncGenerator[list[StreamedLetter], None]:
    """Yield what the stream of a context holds now from a time or a number on, oldest first, in pages.

    Neither with nats-py's `fetch`, which takes a message with a header `Status` for the server's own word and drops it,
    nor with headers alone, for which a server (2.15) ends at a block that holds no headers.
    """
    name, connection = stream_name(context, "dlq"), connection_of(js)
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, mem_storage=True, inactive_threshold=2 * _SECONDS)
    if isinstance(begin, datetime):
        config.deliver_policy, config.opt_start_time = DeliverPolicy.BY_START_TIME, begin
    else:
        config.deliver_policy, config.opt_start_seq = DeliverPolicy.BY_START_SEQUENCE, begin
    try:
        consumer = await js.add_consumer(name, config)  # the server forgets it by itself
        left = consumer.num_pending or 0
        pages = await connection.subscribe(connection.new_inbox())
        try:
            while left:
                request, page = {"batch": min(_PAGE, left), "no_wait": True}, list[StreamedLetter]()
                asked = api_subject(js, f"CONSUMER.MSG.NEXT.{name}.{consumer.name}")
                await connection.publish(asked, msgspec.json.encode(request), reply=pages.subject)
                for _ in range(min(_PAGE, left)):
                    message = await pages.next_msg(timeout=_SECONDS)
                    if not message.reply.startswith("$JS.ACK."):  # the rest has gone meanwhile
                        left = 0
                        break
                    left = message.metadata.num_pending
                    page.append(_read(message))
                yield page
        finally:
            await pages.unsubscribe()
    except NotFoundError:
        return  # it is made with the first letter
    except NATS_ERRORS as error:
        raise from_nats(error, f"reading the dead letters of {context}") from error


def _read(message: Msg) -> StreamedLetter:
    found, headers = message.metadata, message.headers or {}
    stream, sequence = found.stream, found.sequence.stream
    try:
        letter = msgspec.json.decode(message.data, type=DeadLetter)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        letter = None
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


async def check_context(js: JetStreamContext, context: str) -> None:
    """Raise `NotFound` where no stream takes any subject of the context: nobody may read that as good news."""
    for subjects in (f"{context}.>", f"cmd.{context}.>"):
        try:
            await js.find_stream_name_by_subject(subjects)
        except NotFoundError:
            continue
        except NATS_ERRORS as error:
            raise from_nats(error, f"looking for the streams of {context}") from error
        return
    raise no_streams(context)
