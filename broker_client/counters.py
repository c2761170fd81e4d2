"""What the relay counts; the daemon exports it. Plain numbers, so that this room needs no metrics library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from broker_client.answers import Outcome

LATENCY_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds


class RelayCounters:
    """Counted since the start of the process.

    `attempts` by `Outcome`; `batches` by `answered` or the `Failure`; `latency` holds how many posts took at most each
    of `LATENCY_BOUNDS`, not cumulated, and one last count for the longer ones.
    """

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter({outcome.value: 0 for outcome in Outcome})
        self.batches: Counter[str] = Counter()
        self.latency: list[int] = [0] * (len(LATENCY_BOUNDS) + 1)
        self.latency_seconds = 0.0  # of all posts together

    def batch(self, result: str, outcomes: Iterable[Outcome], seconds: float) -> None:
        """Count one post: what came of it as a whole and of each message, and how long it took."""
        self.batches[result] += 1
        self.attempts.update(outcomes)
        self.latency_seconds += seconds
        self.latency[next((n for n, bound in enumerate(LATENCY_BOUNDS) if seconds <= bound), -1)] += 1
