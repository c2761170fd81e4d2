"""What the socket counts: plain integers, bumped in the hot path, read by the metrics collector when it is scraped."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import Final

LATENCY_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # seconds


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
