"""The pauses and rates that operators set, for everything or for one destination (docs/contract/send.md#send-90).

And the search for the one message that makes every batch with it fail, by halving (docs/contract/send.md#send-64): a
batch that fails as a whole makes its rows suspects: each may only be posted again in a batch of half that size. What
is answered is cleared. So a batch shrinks around its cause until that message is alone. Only memory: after a restart
the search begins anew.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from outbox.model import ClaimedRow, RelayControl

PORTION_SECONDS: Final = 0.1  # of a rate over everything: posts are this far apart
DESTINATION_PORTION_SECONDS: Final = 1.0  # of one destination, whose rows have to be looked for among the others
_ANY_SIZE: Final = sys.maxsize
MOST_SUSPECTS: Final = 10_000  # rows remembered; the oldest are forgotten, which only makes the search longer


class Rate:
    """A bucket that fills at `per_second` and is emptied in portions, so that a rate is not a post per message.

    It starts empty and holds one portion at most: after a quiet hour nobody is flooded either.
    """

    def __init__(self, per_second: float, portion_seconds: float, now_ms: int) -> None:
        self._per_second = per_second
        self._portion = max(1.0, per_second * portion_seconds)
        self._level = 0.0
        self._filled_at = now_ms

    def allowance(self, now_ms: int) -> int:
        """Return how many messages may go now: none, or a portion."""
        self._fill(now_ms)
        return math.floor(self._level) if self._level >= 1 and self.wait_seconds(now_ms) <= 0 else 0

    def wait_seconds(self, now_ms: int) -> float:
        """Return how long it takes until a portion may go."""
        self._fill(now_ms)
        return max(0.0, (math.floor(self._portion) - self._level) / self._per_second)

    def take(self, count: int) -> None:
        """Use up what `count` messages need."""
        self._level -= count

    def _fill(self, now_ms: int) -> None:
        passed = max(0, now_ms - self._filled_at) / 1000
        self._level = min(self._portion, self._level + passed * self._per_second)
        self._filled_at = now_ms


class Controls:
    """Pauses and rates as the relay applies them between two looks at the outbox's table."""

    def __init__(self, controls: Mapping[str, RelayControl] | None = None, now_ms: int = 0) -> None:
        """Take the controls by destination, '' for everything, as `Outbox.relay_controls` returns them."""
        self.paused = False
        self.paused_destinations: list[str] = []
        self.rate_per_second: float | None = None
        self._rate: Rate | None = None
        self._rates: dict[str, Rate] = {}
        for destination, control in (controls or {}).items():
            if not destination:
                self.paused, self.rate_per_second = control.paused, control.rate_per_second
                if control.rate_per_second is not None:
                    self._rate = Rate(control.rate_per_second, PORTION_SECONDS, now_ms)
            elif control.paused:
                self.paused_destinations.append(destination)
            elif control.rate_per_second is not None:
                self._rates[destination] = Rate(control.rate_per_second, DESTINATION_PORTION_SECONDS, now_ms)

    def allowance(self, most: int, now_ms: int) -> int:
        """Return how many messages may be claimed now, at most `most`."""
        return most if self._rate is None else min(most, self._rate.allowance(now_ms))

    def excluded(self, now_ms: int) -> list[str]:
        """Return the destinations that nothing may go to now."""
        return [*self.paused_destinations, *(to for to, rate in self._rates.items() if not rate.allowance(now_ms))]

    def wait_seconds(self, now_ms: int) -> float:
        """Return when it is worth looking again, as far as rates are concerned; infinite without any."""
        rates: Sequence[Rate] = [self._rate] if self._rate is not None else list(self._rates.values())
        waits = [wait for rate in rates if (wait := rate.wait_seconds(now_ms)) > 0]
        return min(waits, default=math.inf)

    def admit(self, rows: Sequence[ClaimedRow], now_ms: int) -> tuple[list[ClaimedRow], list[ClaimedRow]]:
        """Split claimed rows into those within their destination's rate and those beyond; uses up what it admits."""
        left = {to: rate.allowance(now_ms) for to, rate in self._rates.items()}
        admitted, beyond = _split(rows, left) if left else (list(rows), [])
        for to, count in Counter(row.destination for row in admitted).items():
            if to in self._rates:
                self._rates[to].take(count)
        if self._rate is not None:
            self._rate.take(len(admitted))
        return admitted, beyond


def _split(rows: Sequence[ClaimedRow], left: Mapping[str, int]) -> tuple[list[ClaimedRow], list[ClaimedRow]]:
    remaining = dict(left)
    admitted: list[ClaimedRow] = []
    beyond: list[ClaimedRow] = []
    for row in rows:
        if row.destination in remaining:
            remaining[row.destination] -= 1
        (beyond if remaining.get(row.destination, 0) < 0 else admitted).append(row)
    return admitted, beyond


class Suspicion(NamedTuple):
    """What is held against a row: see `Suspects.failed`."""

    largest: int  # the batch it may be posted in
    answered: int  # posts that had been answered when it last failed
    proven: bool = False  # it failed alone while the broker answered others


class Suspects:
    """The rows that were in a batch that failed as a whole, and not answered since."""

    def __init__(self) -> None:
        self._rows: dict[str, Suspicion] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def failed(self, batch: Sequence[ClaimedRow], answered: int) -> bool:
        """Suspect each row of `batch`, which failed when `answered` posts had been answered, ever.

        Returns whether the batch is to blame, not the broker: every row of it has failed before, and the broker has
        answered other posts since. A single message that is to blame stays so until it is answered.
        """
        to_blame = all(self._is_to_blame(row, answered) for row in batch)
        suspicion = Suspicion(max(1, len(batch) // 2), answered, proven=to_blame and len(batch) == 1)
        for row in batch:
            self._rows.pop(row.row_id, None)
            self._rows[row.row_id] = suspicion
        for row_id in list(self._rows)[: max(0, len(self._rows) - MOST_SUSPECTS)]:
            del self._rows[row_id]
        return to_blame

    def clear(self, batch: Iterable[ClaimedRow]) -> None:
        """Forget the rows of a batch that was answered."""
        if self._rows:
            for row in batch:
                self._rows.pop(row.row_id, None)

    def divide(self, rows: Sequence[ClaimedRow]) -> list[list[ClaimedRow]]:
        """Split claimed rows into batches that no suspect is too large for.

        Those beyond suspicion come first, and among suspects those that failed longest ago: what goes first is most
        likely to get through.
        """
        if not self._rows:
            return [list(rows)] if rows else []
        order = {row_id: number for number, row_id in enumerate(self._rows)}
        groups: dict[int, list[ClaimedRow]] = {}
        for row in sorted(rows, key=lambda row: order.get(row.row_id, -1)):
            suspicion = self._rows.get(row.row_id)
            groups.setdefault(suspicion.largest if suspicion else _ANY_SIZE, []).append(row)
        return [batch for size in sorted(groups, reverse=True) for batch in _chunks(groups[size], size)]

    def _is_to_blame(self, row: ClaimedRow, answered: int) -> bool:
        suspicion = self._rows.get(row.row_id)
        return suspicion is not None and (suspicion.proven or suspicion.answered < answered)


def _chunks(rows: list[ClaimedRow], size: int) -> Iterator[list[ClaimedRow]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
