"""A NATS server in memory for the simulation: its protocol, and of JetStream one stream with pull consumers.

It keeps, as a server's disk does, what was stored and what each durable consumer has acknowledged; a delivery that is
not acknowledged within `ack_wait` comes again. Requests of a connection that is gone are forgotten.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from faults.virtual_time import EPOCH, Loop

_TICK_SECONDS: Final = 0.1
_NANOSECONDS: Final = 1_000_000_000
_API: Final = "$JS.API."
_ACK: Final = "$JS.ACK."
_ABSENT: Final = {"error": {"code": 404, "err_code": 10014, "description": "consumer not found"}}
_INFO: Final = {
    "server_id": "SIMULATED",
    "server_name": "simulated",
    "version": "2.12.0",
    "proto": 1,
    "headers": True,
    "jetstream": True,
    "max_payload": 1048576,
}


class Stored(NamedTuple):
    """A message of the stream."""

    subject: str
    message_id: str
    body: bytes


class Asked(NamedTuple):
    """A pull request, or what is left of one."""

    connection: Connection
    inbox: str
    wanted: int
    until: float
    heartbeat: float


@dataclass
class Durable:
    """A durable consumer: where it stands, and what it has delivered that is not acknowledged."""

    config: dict[str, Any]
    created: str
    delivered: int = 0  # deliveries
    next: int = 1  # the sequence that is delivered next for the first time
    attempts: dict[int, int] = field(default_factory=dict)  # of what is not acknowledged, by sequence
    due: dict[int, float] = field(default_factory=dict)  # when each of these comes again
    asked: deque[Asked] = field(default_factory=deque)


class Jetstream:
    """One stream; `serve` it anew after each crash of the server."""

    def __init__(self, loop: Loop, stream: str, subject: str) -> None:
        self.messages: list[Stored] = []
        self._loop = loop
        self._stream = stream
        self._subject = subject
        self._durables: dict[str, Durable] = {}

    async def serve(self, port: int) -> None:
        """Listen, and deliver what is due, for ever."""
        for durable in self._durables.values():
            durable.asked.clear()
        await self._loop.create_server(lambda: Connection(self), "127.0.0.1", port)
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            for name, durable in self._durables.items():
                self._deliver(name, durable)
                self._answer_requests(durable)

    def publish(self, message: Stored) -> None:
        """Store a message."""
        self.messages.append(message)

    def answer(self, connection: Connection, subject: str, reply: str, body: bytes) -> None:
        """Do what was published to the server."""
        if subject.startswith(_ACK):
            self._acknowledge(subject, body)
        elif subject.startswith(f"{_API}CONSUMER.MSG.NEXT.{self._stream}."):
            durable = self._durables.get(subject.rpartition(".")[2])
            request = json.loads(body)
            if durable is not None:
                until = self._loop.time() + request["expires"] / _NANOSECONDS
                beat = self._loop.time() + request["idle_heartbeat"] / _NANOSECONDS
                durable.asked.append(Asked(connection, reply, request["batch"], until, beat))
        elif subject.startswith(f"{_API}CONSUMER."):
            connection.deliver(reply, json.dumps(self._consumer(subject, body)).encode())
        elif subject == f"{_API}STREAM.INFO.{self._stream}":
            connection.deliver(reply, json.dumps(self._info()).encode())
        else:
            connection.deliver(reply, json.dumps({"error": {"code": 400, "description": "not simulated"}}).encode())

    def forget(self, connection: Connection) -> None:
        """Drop the requests of a connection that is gone."""
        for durable in self._durables.values():
            durable.asked = deque(asked for asked in durable.asked if asked.connection is not connection)

    def _info(self) -> dict[str, Any]:
        count = len(self.messages)
        state = {
            "messages": count,
            "bytes": 0,
            "first_seq": 1,
            "last_seq": count,
            "consumer_count": len(self._durables),
        }
        return {"config": {"name": self._stream, "subjects": [self._subject]}, "state": state}

    def _consumer(self, subject: str, body: bytes) -> dict[str, Any]:
        verb, _stream, name, *_ = subject.removeprefix(f"{_API}CONSUMER.").replace("DURABLE.", "").split(".")
        if verb == "CREATE" and name not in self._durables:
            created = datetime.fromtimestamp(EPOCH + self._loop.time(), UTC).isoformat().replace("+00:00", "Z")
            self._durables[name] = Durable(json.loads(body)["config"], created)
        durable = self._durables.get(name)
        if durable is None:
            return _ABSENT
        place = {"consumer_seq": durable.delivered, "stream_seq": durable.next - 1}
        return {
            "stream_name": self._stream,
            "name": name,
            "created": durable.created,
            "config": durable.config,
            "delivered": place,
            "ack_floor": place,
            "num_ack_pending": len(durable.attempts),
            "num_redelivered": 0,
            "num_waiting": len(durable.asked),
            "num_pending": len(self.messages) + 1 - durable.next,
        }

    def _acknowledge(self, subject: str, body: bytes) -> None:
        _, _, _, name, _, sequence, *_ = subject.split(".")
        durable, number = self._durables[name], int(sequence)
        if number not in durable.attempts:
            return
        word, _, more = body.partition(b" ")
        if word == b"+ACK":
            del durable.attempts[number], durable.due[number]
        elif word == b"-NAK":
            delay = json.loads(more)["delay"] / _NANOSECONDS if more else 0.0
            durable.due[number] = self._loop.time() + delay
        elif word == b"+WPI":
            durable.due[number] = self._loop.time() + durable.config["ack_wait"] / _NANOSECONDS

    def _deliver(self, name: str, durable: Durable) -> None:
        """Give what is due to whoever asked first."""
        for number in list(self._ready(durable)):
            if not durable.asked:
                return
            asked = durable.asked.popleft()
            if asked.wanted > 1:
                beat = self._loop.time() + 2
                durable.asked.appendleft(asked._replace(wanted=asked.wanted - 1, heartbeat=beat))
            durable.next = max(durable.next, number + 1)
            durable.delivered += 1
            attempt = durable.attempts[number] = durable.attempts.get(number, 0) + 1
            durable.due[number] = self._loop.time() + durable.config["ack_wait"] / _NANOSECONDS
            left = len(self.messages) + 1 - durable.next
            at = EPOCH * _NANOSECONDS
            reply = f"{_ACK}{self._stream}.{name}.{attempt}.{number}.{durable.delivered}.{at}.{left}"
            message = self.messages[number - 1]
            headers = f"NATS/1.0\r\nNats-Msg-Id: {message.message_id}\r\n\r\n".encode()
            asked.connection.deliver(asked.inbox, message.body, headers, reply, message.subject)

    def _ready(self, durable: Durable) -> Iterator[int]:
        now = self._loop.time()
        yield from sorted(number for number, due in durable.due.items() if due <= now)
        yield from range(durable.next, len(self.messages) + 1)

    def _answer_requests(self, durable: Durable) -> None:
        """End the requests whose time is up, and tell the others that the server is there."""
        now = self._loop.time()
        kept: deque[Asked] = deque()
        for asked in durable.asked:
            if asked.until <= now:
                left = f"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: {asked.wanted}\r\n\r\n"
                asked.connection.deliver(asked.inbox, b"", left.encode())
                continue
            if asked.heartbeat <= now:
                asked.connection.deliver(asked.inbox, b"", b"NATS/1.0 100 Idle Heartbeat\r\n\r\n")
                asked = asked._replace(heartbeat=now + 2)  # noqa: PLW2901 - the same request
            kept.append(asked)
        durable.asked = kept


class Connection(asyncio.Protocol):
    """A client's connection, as the server has it."""

    def __init__(self, jetstream: Jetstream) -> None:
        self._jetstream = jetstream
        self._transport: Any = None
        self._unread = b""
        self._subscriptions: dict[str, str] = {}  # subjects by the client's number

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say who it is."""
        self._transport = transport
        self._write(f"INFO {json.dumps(_INFO)}\r\n".encode())

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget what it asked for."""
        del exc
        self._transport = None
        self._jetstream.forget(self)

    def data_received(self, data: bytes) -> None:
        """Do what the client says, command by command."""
        self._unread += data
        while self._transport is not None and b"\r\n" in self._unread:
            line, _, rest = self._unread.partition(b"\r\n")
            word, *words = line.decode().split(" ")
            if word in ("PUB", "HPUB"):
                size = int(words[-1])
                if len(rest) < size + 2:
                    return
                head = int(words[-2]) if word == "HPUB" else 0
                subject, *reply = words[: -2 if word == "HPUB" else -1]
                self._unread = rest[size + 2 :]
                self._jetstream.answer(self, subject, reply[0] if reply else "", rest[head:size])
                continue
            self._unread = rest
            if word == "PING":
                self._write(b"PONG\r\n")
            elif word == "SUB":
                self._subscriptions[words[-1]] = words[0]
            elif word == "UNSUB" and len(words) == 1:
                self._subscriptions.pop(words[0], None)

    def deliver(
        self, inbox: str, body: bytes, headers: bytes = b"", reply: str = "", subject: str | None = None
    ) -> None:
        """Send a message to whoever subscribed to `inbox`; it says that it was sent to `subject`."""
        for number, pattern in self._subscriptions.items():
            if pattern == inbox or (pattern.endswith("*") and inbox.startswith(pattern[:-1])):
                place = f"{subject or inbox} {number} {reply}{' ' if reply else ''}"
                sizes = f"{len(headers)} {len(headers) + len(body)}" if headers else str(len(body))
                word = "HMSG" if headers else "MSG"
                self._write(f"{word} {place}{sizes}\r\n".encode() + headers + body + b"\r\n")

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
