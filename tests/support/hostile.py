"""Messages that no client of NATS would write, put into streams byte by byte, as anybody may who reaches the server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple
from urllib.parse import urlsplit

import pytest
import structlog

_ODD_BODIES = (
    b"",
    b"null",
    b"[" * 100_000,
    b'{"a":' * 3000 + b"1" + b"}" * 3000,
    b"[" * 400 + b"]" * 400,
    b'"\\ud800"',
    b'{"broker_message_id":"\\u0000"}',
    b'{"broker_message_id":"\\ud800"}',
    b'{"broker_message_id":17}',
    b'{"broker_message_id":"' + b"x" * 5000 + b'"}',
    b'{"retry_policy":{"max_attempts":1e400}}',
    b'{"retry_policy":{"max_attempts":-1},"a":1}',
    b'{"answers":"not a uuid"}',
    b'{"a":1e400}',
    b'{"a":' + b"9" * 5000 + b"}",
    b'{"tenant":1,"idempotency_key":[]}',
    b"\xef\xbb\xbf{}",
    b"\xff\xfe{}",
    b"{} {}",
)
_ODD_BLOCKS = (
    *(b"NATS/1.0\r\n\r\n"[:length] for length in range(1, 12)),
    *(b"\xff" * length for length in range(1, 11)),
    b"NATS/1.0 404\r\n\r\n",
    b"NATS/1.0 100 Idle Heartbeat\r\n\r\n",
    b"NATS/1.0 \xff\xff\xff\r\n\r\n",
    b"NATS/1.0 409 Consumer Deleted\r\nNats-Pending-Messages: x\r\n\r\n",
    b"NATS/1.0\r\nStatus: 404\r\n\r\n",
    b"NATS/1.0\r\n: nobody\r\n\r\n",
    b"NATS/1.0\r\nno colon\r\n\r\n",
    b"NATS/1.0\r\nA: \xff\r\n\r\n",
    b"NATS/1.0\r\n\xff: a\r\n\r\n",
    b"NATS/1.0\r\nA: b\r\n",
    b"NATS/1.0\nA: b\n\n",
    b"HTTP/1.1\r\nA: b\r\n\r\n",
)
_NAMES = (
    "Nats-Msg-Id",
    "Postroom-Epoch",
    "Postroom-Replay-Of",
    "Postroom-Expected-Version",
    "Postroom-Entity-Id",
    "Postroom-Unreadable-Headers",
    "Idempotency-Key",
    "X-Occurred-At",
    "X-Event-Version",
    "X-Causation-Id",
    "X-Correlation-Id",
    "traceparent",
)
_VALUES = (
    b"",
    b"0",
    b"-1",
    b"9" * 30,
    b"a\tb",
    b"\x00",
    b"\x7f",
    "é\U0001f600".encode(),
    b"9999-12-31T23:59:59+00:00",
    b"x" * 3000,
)
_ENDS_OF_SUBJECTS = (b"\xff", b"a\x0bb", b"a\x0cb", b"\x00", b"*", b">", "é".encode(), b"x" * 2000)


class HostileMessage(NamedTuple):
    """What is published: a header block, or none, and a body."""

    block: bytes | None
    body: bytes


def odd_messages() -> Iterator[HostileMessage]:
    """Yield one of each kind of oddity."""
    yield from (HostileMessage(block, b"{}") for block in _ODD_BLOCKS)
    yield from (HostileMessage(None, body) for body in _ODD_BODIES)
    yield from (HostileMessage(_block(f"odd-{index}", {}), body) for index, body in enumerate(_ODD_BODIES))
    yield HostileMessage(_block("/1", {"Postroom-Epoch": b"1"}), b'{"total":1}')  # an id that is its epoch alone
    for name in _NAMES:
        for index, value in enumerate(_VALUES):
            identity = "" if name == "Nats-Msg-Id" else f"{name}-{index}"
            yield HostileMessage(_block(identity, {name: value}), b'{"total":1}')


def random_messages(count: int, *, seed: int) -> Iterator[HostileMessage]:
    """Yield as many as asked for, the same for each seed: bytes by chance, with headers and without."""
    chance = random.Random(seed)
    for number in range(count):
        body = chance.choice((chance.randbytes(chance.randrange(200)), chance.choice(_ODD_BODIES), b'{"total":1}'))
        yield HostileMessage(_random_block(chance, number), body)


def odd_subjects(prefix: str) -> list[bytes]:
    """Return subjects that a server takes below `prefix`, though few clients would send them."""
    return [prefix.encode() + b"." + end for end in _ENDS_OF_SUBJECTS]


@asynccontextmanager
async def byte_writer(nats_url: str) -> AsyncIterator[ByteWriter]:
    """Connect to a server without any client."""
    parts = urlsplit(nats_url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    login = {"user": parts.username, "pass": parts.password, "headers": True, "verbose": False, "protocol": 1}
    writer.write(b"CONNECT " + json.dumps(login).encode() + b"\r\n")
    bytes_out = ByteWriter(reader, writer)
    await bytes_out.flush()
    try:
        yield bytes_out
    finally:
        writer.close()
        await writer.wait_closed()


class ByteWriter:
    """A connection that writes whatever it is given."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def publish(self, subject: str | bytes, messages: Iterable[HostileMessage]) -> None:
        """Publish `messages`, and return when the server has read them all."""
        name = subject if isinstance(subject, bytes) else subject.encode()
        for block, body in messages:
            if block is None:
                self._writer.write(b"PUB %s %d\r\n%s\r\n" % (name, len(body), body))
            else:
                size = len(block)
                self._writer.write(b"HPUB %s %d %d\r\n%s%s\r\n" % (name, size, size + len(body), block, body))
            await self._writer.drain()
        await self.flush()

    async def flush(self) -> None:
        """Return when the server has answered."""
        self._writer.write(b"PING\r\n")
        while not (line := await self._reader.readline()).startswith(b"PONG"):
            if not line:
                raise ConnectionError("the server hung up")
            if line.startswith(b"-ERR") and b"Invalid Publish Subject" not in line:  # of those it stores some
                raise ConnectionError(line.decode())


def _block(identity: str, headers: dict[str, bytes]) -> bytes:
    lines = {**({"Nats-Msg-Id": identity.encode()} if identity else {}), **headers}
    written = b"".join(f"{name}: ".encode() + value + b"\r\n" for name, value in lines.items())
    return b"NATS/1.0\r\n" + written + b"\r\n"


def _random_block(chance: random.Random, number: int) -> bytes | None:
    match chance.randrange(5):
        case 0:
            return None
        case 1:
            return chance.randbytes(chance.randrange(1, 11))
        case 2:
            return b"NATS/1.0" + chance.randbytes(chance.randrange(60))
        case 3:
            return b"NATS/1.0\r\n" + chance.randbytes(chance.randrange(60)) + b"\r\n\r\n"
    octets = chance.randbytes(20).replace(b"\r", b"").replace(b"\n", b"")
    return _block(f"random-{number}", {chance.choice(_NAMES): chance.choice((*_VALUES, octets))})


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Keep log lines to themselves: an unconfigured log draws each of thousands of tracebacks."""
    with structlog.testing.capture_logs():
        yield


Chunks = list[Iterator[HostileMessage]]
WAYS = ["odd", "random", pytest.param("ten thousand", marks=pytest.mark.soak)]


def chunks(way: str, seed: int) -> Chunks:
    """Return the messages of one of the `WAYS`, piece by piece."""
    ways: dict[str, Chunks] = {
        "odd": [odd_messages()],
        "random": [random_messages(200, seed=seed)],
        "ten thousand": [random_messages(500, seed=number) for number in range(20)],
    }
    return ways[way]
