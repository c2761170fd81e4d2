"""What an HTTP handler counts, for metrics: plain numbers, put in order when they are scraped."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

CALL_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)  # seconds


class HandlerCounters:
    """Everything since the process started."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.answers: Counter[str] = Counter()  # by `http_<status>`, or the code of a call without an answer
        self.calls_under_way = 0
        self.call_counts = [0] * (len(CALL_BOUNDS) + 1)
        self.call_seconds = 0.0
        self.duplicates = 0
        self.malformed = 0
        self.held = 0
        self.leases_lost = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Count and time one call of the handler."""
        started = self._clock()
        self.calls_under_way += 1
        try:
            yield
        finally:
            self.calls_under_way -= 1
            seconds = self._clock() - started
            self.call_seconds += seconds
            self.call_counts[bisect_left(CALL_BOUNDS, seconds)] += 1
