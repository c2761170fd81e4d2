"""How much a caller may ask for, and how slow it may be (docs/contract/send.md#send-27).

`Counters` is what the socket counts: plain integers, bumped in the hot path, read when the metrics are scraped.
"""

from __future__ import annotations

import resource
from bisect import bisect_left
from collections import Counter
from typing import Annotated, Final

import msgspec

from postroom._wire.message import MAX_BODY_BYTES

_FDS_KEPT_FREE: Final = 64  # for the database, the broker's connections, logs and whatever else the process opens
MIB: Final = 1024 * 1024

Bytes = Annotated[int, msgspec.Meta(ge=1024)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
LATENCY_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # seconds


class Limits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Limits on size, count and time; a caller that exceeds one is refused or disconnected, and nothing is written.

    What is held at once is per uid; all together may hold twice that, each no more than is still free.
    """

    body_bytes: Annotated[Bytes, msgspec.Meta(description="Largest body of a message, in bytes (413).")] = (
        MAX_BODY_BYTES
    )
    request_bytes: Annotated[
        Bytes, msgspec.Meta(description="Largest request, or line of a batch: the JSON around a body, in bytes (413).")
    ] = 4 * MIB  # text that JSON writes as \uXXXX grows up to threefold
    buffered_bytes: Annotated[Bytes, msgspec.Meta(description="Bytes of requests held in memory at once (429).")] = (
        64 * MIB
    )
    requests_in_flight: Annotated[Count, msgspec.Meta(description="Requests being answered at once (429).")] = 1024
    waits: Annotated[
        Count, msgspec.Meta(description="Look-ups that wait for a send to settle, in addition to those requests (429).")
    ] = 1024
    connections: Annotated[
        Count, msgspec.Meta(description="Open connections; always kept below the limit on file descriptors.")
    ] = 4096
    headers: Annotated[Count, msgspec.Meta(description="Header fields of one request (400).")] = 100
    header_seconds: Annotated[
        Seconds, msgspec.Meta(description="Time for the head of a request, from its first byte, in seconds.")
    ] = 10.0
    body_seconds: Annotated[
        Seconds, msgspec.Meta(description="Time for the body of a request, or for a line of a batch, in seconds.")
    ] = 30.0
    stall_seconds: Annotated[
        Seconds, msgspec.Meta(description="Time without a byte within a body, or without a reply being read.")
    ] = 30.0
    idle_seconds: Annotated[
        Seconds, msgspec.Meta(description="Time that a connection may idle between two requests, in seconds.")
    ] = 75.0

    def connection_cap(self) -> int:
        """Return how many connections may be open, so that file descriptors remain for everything else."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY:
            return self.connections
        return max(1, min(self.connections, soft - _FDS_KEPT_FREE))


class Latency:
    """A histogram of seconds: how many observations fell below each bound, and their sum."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(LATENCY_BOUNDS, seconds)] += 1
        self.total += seconds


class Counters:
    """Everything that the socket counts since the process began."""

    def __init__(self) -> None:
        self.sends: Counter[str] = Counter()  # by outcome: queued, inflight, done, or the problem's code
        self.accept = Latency()  # of POST /v1/send, from the parsed head to the answer
        self.batches = 0
        self.answers: Counter[int] = Counter()  # every request but sends, by status
        self.dropped: Counter[str] = Counter()  # connections ended by a deadline or a cap, by reason
        self.connections = 0  # open now
        self.in_flight = 0  # requests being answered now, those of the live stream apart
        self.event_readers = 0  # of the live stream, now
