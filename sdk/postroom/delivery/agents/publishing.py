"""Publishing what the store holds: pipelined, each message under the id that it was stored with, and marked after.

The mark says where the message is: the stream, when that was created, and the number in it. The record (record.py)
compares streams with that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec
import structlog
from nats.js import JetStreamContext
from nats.js.api import PubAck

from postroom.delivery.agents.counters import AgentCounters
from postroom.delivery.agents.decisions import Draft
from postroom.delivery.agents.envelopes import headers_of, to_microseconds
from postroom.delivery.agents.records import decode_record, payload_of
from postroom.delivery.agents.settings import AgentSettings
from postroom.delivery.agents.store import Mark, Outgoing, Store, durably
from postroom.delivery.agents.turns import Turns
from postroom.delivery.dead_letters.letter import EVENT_TYPE, EVENT_TYPE_HEADER, DeadLetter, letter_id
from postroom.delivery.errors import from_nats
from postroom.delivery.nats import end_if_cancelled
from postroom.delivery.nats_client import connection_of
from postroom.delivery.publishing.displaced import message_id_at
from postroom.delivery.publishing.queue_state import Holes, read_holes
from postroom.delivery.publishing.source import identifying
from postroom.delivery.publishing.streams import StreamPicture, Streams
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

HEADER_BYTES: Final = 16 * 1024  # of a message that its headers may take


class Message(NamedTuple):
    """A stored message on its way out."""

    position: int
    cause: int  # the position of the message that caused it
    epoch: int  # how often a stream has lost it
    subject: str
    headers: dict[str, str]
    body: bytes


def message_of(position: int, cause: int, draft: Draft) -> Message:
    """Return the message of an event that was just stored."""
    return Message(position, cause, 0, draft.subject, headers_of(draft.envelope), draft.payload)


def stored_message(outgoing: Outgoing, most_bytes: int) -> Message:
    """Return the same message, or a dead letter, read back from the store; what was lost has a fresh message id.

    A letter of more than `most_bytes`, which is larger than NATS takes, goes out without its payload.
    """
    position, epoch, text, subject = outgoing
    if subject is not None:
        letter = msgspec.json.decode(text, type=DeadLetter)
        headers = {**identifying(letter_id(letter), epoch), EVENT_TYPE_HEADER: EVENT_TYPE}
        body = text if len(text) <= most_bytes else msgspec.json.encode(letter.shortened())
        return Message(position, position, epoch, subject, headers, body)
    record = decode_record(text)
    headers = headers_of(record.envelope, epoch)
    return Message(position, record.cause or 0, epoch, record.subject, headers, payload_of(text))


class Publisher:
    """Publishes for one agent, and marks what JetStream has."""

    def __init__(
        self,
        js: JetStreamContext,
        store: Store,
        turns: Turns,
        settings: AgentSettings,
        *,
        counters: AgentCounters,
        clock: Callable[[], int],
    ) -> None:
        """`clock` gives ms since the epoch."""
        self.connected: Callable[[], Awaitable[object]] = self.look  # awaited on each new connection, before anything
        self._connects = -1  # what the connection had counted of them then
        self._js = js
        self._store = store
        self._turns = turns
        self._settings = settings
        self._counters = counters
        self._clock = clock
        self._streams = Streams()
        self._known = False  # whether the picture of the streams is good

    def read(self, stored: Sequence[Outgoing]) -> list[Message]:
        """Return what is stored as it goes out."""
        most_bytes = connection_of(self._js).max_payload - HEADER_BYTES
        return [stored_message(outgoing, most_bytes) for outgoing in stored]

    async def rounds(self, messages: Sequence[Message]) -> AsyncIterator[set[int]]:
        """Publish until JetStream has everything; after each round yield the causes of what it has not."""
        while True:
            messages = await self.publish(messages)
            yield {message.cause for message in messages}
            if not messages:
                return
            end_if_cancelled()
            await asyncio.sleep(self._settings.retry_seconds)

    async def publish(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Publish all at once, and mark what JetStream acknowledged in time; return what it did not."""
        if not messages or not await self._ready():
            return messages
        acks = await self._send(messages)
        placed = await self._placed(acks)
        if placed:
            now = self._clock()
            marks = [Mark(message.position, message.epoch, now, *place) for message, place in placed]
            async with self._turns.turn():
                self._counters.lost += await durably(partial(self._store.mark_published, marks))
            self._counters.published += len(marks)
        there = {message.position for message, _ in placed}
        return [message for message in messages if message.position not in there]

    async def look(self) -> Sequence[StreamPicture]:
        """Look at the streams; raises `PostroomError`."""
        await self._streams.refresh(self._js)
        self._known = True
        return self._streams.pictures

    async def _ready(self) -> bool:
        """Tell whether anything may be published: not before somebody has looked at what a new connection leads to."""
        connection = connection_of(self._js)
        connects = connection.stats["reconnects"]
        if not connection.is_connected:
            return False  # what is sent now would leave before that look
        if connects != self._connects:
            try:
                await self.connected()
            except PostroomError as error:
                _log.warning("agent_streams_unknown", detail=str(error))
                return False
            self._connects = connects
        return True

    async def message_id_at(self, stream: str, sequence: int) -> str | None:
        """Return the id of the message that has this number; None where there is none. Raises `PostroomError`."""
        return await message_id_at(self._js, stream, sequence)

    async def read_holes(self, stream: str) -> Holes:
        """Ask which numbers of a stream are gone; raises `PostroomError`."""
        return await read_holes(self._js, stream)

    async def _send(self, messages: Sequence[Message]) -> list[tuple[Message, PubAck]]:
        sent: list[tuple[Message, asyncio.Future[PubAck]]] = []
        for message in messages:
            try:
                ack = await self._js.publish_async(message.subject, message.body, headers=message.headers)
            except Exception as error:  # noqa: BLE001 - whatever it was, the message stays in the store
                self._refused(message, error)
            else:
                sent.append((message, ack))
        if sent:
            await asyncio.wait([ack for _, ack in sent], timeout=self._settings.publish_seconds)
        return [(message, ack.result()) for message, ack in sent if self._acknowledged(message, ack)]

    def _acknowledged(self, message: Message, ack: asyncio.Future[PubAck]) -> bool:
        if not ack.done():
            ack.cancel()
            self._refused(message, TimeoutError("no acknowledgement"))
            return False
        if (error := ack.exception()) is not None:
            self._refused(message, error)
            return False
        return True

    def _refused(self, message: Message, error: BaseException) -> None:
        self._known = False  # a stream may have gone, or come anew
        doing = f"publishing to {message.subject}"
        detail = str(from_nats(error, doing)) if isinstance(error, Exception) else repr(error)
        _log.warning("agent_publish_failed", subject=message.subject, position=message.position, detail=detail)

    async def _placed(self, acks: Sequence[tuple[Message, PubAck]]) -> list[tuple[Message, tuple[str, int, int]]]:
        """Say where each message is; one whose stream is gone again is nowhere."""
        if not acks:
            return []
        if not (self._known and all(self._plausible(ack) for _, ack in acks)):
            try:
                await self.look()
            except PostroomError as error:
                _log.warning("agent_streams_unknown", detail=str(error))
                return []
        created = {stream.name: to_microseconds(stream.created_at) for stream in self._streams.pictures}
        return [(message, (ack.stream, created[ack.stream], ack.seq)) for message, ack in acks if ack.stream in created]

    def _plausible(self, ack: PubAck) -> bool:
        """Tell whether the picture still holds: a new message has a higher number than all before it."""
        stream = next((picture for picture in self._streams.pictures if picture.name == ack.stream), None)
        return stream is not None and (bool(ack.duplicate) or ack.seq > stream.last_sequence)
