"""The load: keep N connections to a Unix socket busy with sends, one request at a time each, and time every answer.

Runs as a process of its own (`python -m bench.load`), so that it shares nothing with what it measures but the cores.
It speaks HTTP by hand: a client library would be the bottleneck. Prints one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

BODY_BYTES: Final = 1024
NOBODYS_GROUP: Final = 65_534
_HEAD: Final = (
    b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Idempotency-Key: %s\r\nContent-Length: %d\r\n\r\n"
)


class Figures(NamedTuple):
    """What one load found. Latencies in seconds, throughput in answers a second."""

    answers: int
    refused: int  # answers that were not 2xx
    per_second: float
    p50: float
    p99: float


def message() -> bytes:
    """Return the JSON of a send whose body has 1 KiB."""
    order = {"order": 17, "lines": [], "note": ""}
    order["note"] = "x" * (BODY_BYTES - len(json.dumps(order)))
    return json.dumps({"to": "topic:orders", "body": json.dumps(order)}).encode()


class Sender(asyncio.Protocol):
    """One connection: sends, waits for the whole answer, notes the time, sends the next."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._answer = b""
        self._sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        """Note a complete answer and go on, until the load is over."""
        self._answer += data
        head, separator, body = self._answer.partition(b"\r\n\r\n")
        if not separator or len(body) < _content_length(head):
            return
        self._answer = b""
        if self._load.note(time.perf_counter() - self._sent_at, accepted=head[9:10] == b"2"):
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the load that this connection is done; losing it early fails the load."""
        self._load.closed(exc)

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._load.request())  # type: ignore[attr-defined]


class Load:
    """The ids, the clock and the notes of all connections together."""

    def __init__(self, connections: int, seconds: float, first: int) -> None:
        self._open = connections
        self._seconds = seconds
        self._next = first
        self._message = message()
        self._latencies: list[float] = []
        self._refused = 0
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._began = time.perf_counter()

    def request(self) -> bytes:
        """Return the next request; ids grow, as minted ones do."""
        self._next += 1
        return _HEAD % (b"01J%023d" % self._next, len(self._message)) + self._message

    def note(self, latency: float, *, accepted: bool) -> bool:
        """Keep one answer's time; False when the load is over."""
        self._latencies.append(latency)
        self._refused += not accepted
        return time.perf_counter() - self._began < self._seconds

    def closed(self, error: Exception | None) -> None:
        """Count a closed connection; the last one ends the load."""
        self._open -= 1
        if error is not None and not self._finished.done():
            self._finished.set_exception(error)
        elif self._open == 0 and not self._finished.done():
            self._finished.set_result(None)

    async def figures(self) -> Figures:
        """Wait for the last connection and sum up."""
        await self._finished
        took = time.perf_counter() - self._began
        count = len(self._latencies)
        return Figures(count, self._refused, count / took, *percentiles(self._latencies))


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the p50 and the p99 of the values."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


def _content_length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"content-length:")
    return int(rest.split(b"\r\n", 1)[0])


def become(uid: int | None) -> None:
    """Go on as another user, of nobody's group; only root can."""
    if uid is not None:
        os.setgroups([])
        os.setgid(NOBODYS_GROUP)
        os.setuid(uid)


async def run(socket: str, connections: int, seconds: float, first: int) -> Figures:
    """Load `socket` and return the figures."""
    loop = asyncio.get_running_loop()
    load = Load(connections, seconds, first)
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
    parser.add_argument("--uid", type=int, help="the user to send as; only root can choose")
    options = parser.parse_args()
    become(options.uid)
    figures = asyncio.run(run(options.socket, options.connections, options.seconds, options.first))
    print(json.dumps(figures._asdict()))


if __name__ == "__main__":
    main()
