"""A publisher's connection to JetStream: publishes a batch pipelined and says of each message what became of it.

The connection does not come back by itself. One connection stores messages in the order in which they were sent, so
that after a break exactly a beginning of the batch is in the stream; a client that reconnects would send what it still
had in its buffer behind a part that was lost on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Self

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from postroom.delivery.errors import from_nats
from postroom.delivery.nats import connect
from postroom.delivery.publishing.audit import SUBJECT, Audit
from postroom.delivery.publishing.source import Outgoing, Place
from postroom.delivery.publishing.streams import StreamPicture, Streams
from postroom.delivery.settings import NatsSettings

_LOOK_SECONDS: Final = 0.1  # between two looks at whether the connection still stands
_HEADER_LINE: Final = b"NATS/1.0\r\n"
_LINE_EXTRA: Final = 4  # bytes: a colon, a space, CR and LF

Result = Place | str  # where it is, or why it is nowhere


class _ApiError(msgspec.Struct):
    description: str = "unknown error"


class _Ack(msgspec.Struct):
    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _ApiError | None = None


_decode_ack: Final = msgspec.json.Decoder(_Ack).decode


class Link:
    """One connection, and the server's streams as seen through it."""

    def __init__(self, client: Client, js: JetStreamContext, ack_seconds: float) -> None:
        self.js = js
        self.streams = Streams()
        self._client = client
        self._ack_seconds = ack_seconds
        self._inbox = client.new_inbox()
        self._first = 0  # the number of the first message of the batch
        self._answers: list[_Ack | None] = []
        self._missing = 0
        self._complete = asyncio.Event()

    @classmethod
    async def open(cls, settings: NatsSettings, *, name: str, ack_seconds: float) -> Self:
        """Connect, once, and look at the streams; raises `PostroomError`."""
        client = await connect(settings, name=name, reconnect=False)
        link = cls(client, client.jetstream(timeout=ack_seconds), ack_seconds)
        try:
            await client.subscribe(f"{link._inbox}.*", cb=link._acknowledged)
            await link.streams.refresh(link.js)
        except Exception as error:
            await client.close()
            raise from_nats(error, "connecting to JetStream") from error
        return link

    @property
    def broken(self) -> bool:
        """Whether it is of no more use."""
        return not self._client.is_connected

    async def close(self) -> None:
        """Close the connection."""
        await self._client.close()

    async def listen(self, audit: Audit) -> None:
        """Have `audit` told of what is done to the streams from now on; raises `PostroomError`."""
        try:
            await self._client.subscribe(SUBJECT, cb=audit.hear)
            await self._client.flush()
            await self.streams.refresh(self.js)
        except Exception as error:
            raise from_nats(error, "subscribing to advisories about the streams") from error
        audit.before = {(stream.name, stream.created_at) for stream in self.streams.pictures}

    def refusal(self, message: Outgoing) -> str | None:
        """Say why the server would not take a message, whatever its state; None where it would."""
        stream = self.streams.of(message.subject)
        if stream is None and self.streams.missing:
            names = ", ".join(sorted(self.streams.missing))
            return f"no stream that JetStream lists has {message.subject}, and it cannot list {names} at the moment"
        if stream is None:
            return f"no stream has the subject {message.subject}: declare one"
        size, most = _size(message), self._client.max_payload
        if size > most:
            return f"{size} bytes are more than the NATS server allows: raise its max_payload ({most})"
        if stream.max_message_bytes is not None and size > stream.max_message_bytes:
            return f"{size} bytes are more than the stream {stream.name} allows: raise its max_msg_size"
        return None

    async def publish(self, messages: Sequence[Outgoing]) -> list[Result]:
        """Send `messages`, none of which has a `refusal`, in order, and return what became of each."""
        streams = [self.streams.of(message.subject) for message in messages]
        self._first += len(self._answers)  # a late answer to the batch before is nobody's
        self._answers = [None] * len(messages)
        self._missing = len(messages)
        self._complete.clear()
        for index, message in enumerate(messages):
            if not await self._send(message, index):
                break
        await self._wait()
        return [_result(answer, stream) for answer, stream in zip(self._answers, streams, strict=True)]

    async def _send(self, message: Outgoing, index: int) -> bool:
        reply = f"{self._inbox}.{self._first + index}"
        try:
            await self._client.publish(message.subject, message.body, reply=reply, headers=message.headers)
        except Exception as error:  # noqa: BLE001 - whatever it was, this message and those after it are not sent
            self._answer(index, _failure(from_nats(error, "publishing").problem.detail))
            await self._client.close()
            return False
        return True

    async def _wait(self) -> None:
        """Wait for every answer, for as long as the connection stands and the server may take."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._ack_seconds
        while not self.broken and (left := deadline - clock()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), min(left, _LOOK_SECONDS))
                return

    async def _acknowledged(self, reply: Msg) -> None:
        index = int(reply.subject.rpartition(".")[2]) - self._first
        if index < 0:
            return
        # Without data it is the server's word for it that nobody answers on that subject.
        missing = _failure("no stream answers: it was deleted, or JetStream is unreachable")
        self._answer(index, _decode_ack(reply.data) if reply.data else missing)

    def _answer(self, index: int, ack: _Ack) -> None:
        if self._answers[index] is None:
            self._missing -= 1
        self._answers[index] = ack
        if not self._missing:
            self._complete.set()


def _failure(description: str) -> _Ack:
    return _Ack(error=_ApiError(description))


def _result(answer: _Ack | None, stream: StreamPicture | None) -> Result:
    if answer is None:
        return "JetStream did not acknowledge it"
    if answer.error is not None:
        return answer.error.description
    if stream is None or answer.stream != stream.name:
        return f"the stream {answer.stream} stored it, which did not exist before"
    return Place(stream.name, stream.created_at, answer.seq, answer.duplicate)


def _size(message: Outgoing) -> int:
    """Return the bytes that the server counts: headers and body."""
    lines = sum(len(name) + len(value.encode()) + _LINE_EXTRA for name, value in message.headers.items())
    return len(_HEADER_LINE) + lines + 2 + len(message.body)
