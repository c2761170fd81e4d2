"""The raw load: N connections to a daemon's socket, each sending one message after the other.

Runs as a process of its own (`python -m bench.load`), so that it competes for the cores as real callers do, and speaks
HTTP by hand: a client library would be the bottleneck. Prints one JSON object with the figures, or ends with what was
wrong: an answer that is not a 2xx, a lost connection.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from typing import Final, NamedTuple, cast

from bench.driver import Void, order, percentiles

NOBODYS_GROUP: Final = 65_534
_HEAD: Final = (
    b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Idempotency-Key: %s\r\nContent-Length: %d\r\n\r\n"
)


class Figures(NamedTuple):
    """What one load found. Latencies in seconds, throughput in answers a second."""

    answers: int
    per_second: float
    p50: float
    p99: float


def message() -> bytes:
    """Return the JSON of a send whose body has 1 KiB."""
    return json.dumps({"to": "topic:orders", "body": order()}).encode()


class Sender(asyncio.Protocol):
    """One connection: sends, waits for the whole answer, notes the time, sends the next."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._answer = b""
        self._sent_at = 0.0
        self._over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast(asyncio.WriteTransport, transport)
        self._send()

    def data_received(self, data: bytes) -> None:
        """Note a complete answer and go on, until the load is over."""
        self._answer += data
        head, separator, body = self._answer.partition(b"\r\n\r\n")
        if not separator or len(body) < _content_length(head):
            return
        if head[9:10] != b"2":
            status, _, _ = head[9:].partition(b"\r\n")
            self._load.fail(f"a send was refused: {status.decode()}: {body.decode()}")
        self._answer = b""
        self._over = not self._load.note(time.perf_counter() - self._sent_at)
        if self._over:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the load that this connection is done; losing it early fails the load."""
        if not self._over:
            self._load.fail(f"a connection was lost: {exc or 'closed by the server'}")
        self._load.closed()

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._load.request())


class Load:
    """The ids, the clock and the notes of all connections together."""

    def __init__(self, connections: int, seconds: float, first: int, *, random_ids: bool = False) -> None:
        self._open = connections
        self._seconds = seconds
        self._next = first
        self._random_ids = random_ids
        self._message = message()
        self._latencies: list[float] = []
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began = time.perf_counter()

    def request(self) -> bytes:
        """Return the next request; ids grow, as minted ones do, unless they are the caller's own random ones."""
        self._next += 1
        name = uuid.uuid4().hex.encode() if self._random_ids else b"01J%023d" % self._next
        return _HEAD % (name, len(self._message)) + self._message

    def note(self, latency: float) -> bool:
        """Keep one answer's time; False when the load is over."""
        self._latencies.append(latency)
        return not self._finished.done() and time.perf_counter() - self._began < self._seconds

    def fail(self, why: str) -> None:
        """End the load: it shows nothing."""
        if not self._finished.done():
            self._finished.set_exception(Void(why))

    def closed(self) -> None:
        """Count a closed connection; the last one ends the load."""
        self._open -= 1
        if self._open == 0 and not self._finished.done():
            self._finished.set_result(None)

    async def figures(self) -> Figures:
        """Wait for the last connection and sum up; raises `Void`."""
        await self._finished
        took = time.perf_counter() - self._began
        count = len(self._latencies)
        return Figures(count, count / took, *percentiles(self._latencies))


def _content_length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"content-length:")
    return int(rest.split(b"\r\n", 1)[0])


def become(uid: int | None) -> None:
    """Go on as another user, of nobody's group; only root can."""
    if uid is not None:
        os.setgroups([])
        os.setgid(NOBODYS_GROUP)
        os.setuid(uid)


async def run(socket: str, connections: int, seconds: float, first: int, *, random_ids: bool = False) -> Figures:
    """Load `socket` and return the figures; raises `Void`."""
    loop = asyncio.get_running_loop()
    load = Load(connections, seconds, first, random_ids=random_ids)
    for _ in range(connections):
        await loop.create_unix_connection(lambda: Sender(load), socket)
    return await load.figures()


def main() -> None:
    """Parse the options, run the load, print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--first", type=int, default=0, help="the number of the first id")
    parser.add_argument("--random-ids", action="store_true", help="ids in no order")
    parser.add_argument("--uid", type=int, help="the user to send as; only root can choose")
    options = parser.parse_args()
    become(options.uid)
    try:
        figures = asyncio.run(
            run(options.socket, options.connections, options.seconds, options.first, random_ids=options.random_ids)
        )
    except Void as error:
        sys.exit(str(error))
    print(json.dumps(figures._asdict()))


if __name__ == "__main__":
    main()
