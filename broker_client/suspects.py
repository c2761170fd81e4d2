"""Finding the one message that makes every batch with it fail: halving (spec send.md, "Relaying", second table).

A batch that fails as a whole makes its rows suspects: each may only be posted again in a batch of half that size. What
is answered is cleared. So a batch shrinks around its cause until that message is alone. Only memory: after a restart
the search begins anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from outbox.model import ClaimedRow

_ANY_SIZE: Final = sys.maxsize
MOST_SUSPECTS: Final = 10_000  # rows remembered; the oldest are forgotten, which only makes the search longer


class Suspicion(NamedTuple):
    """The largest batch the row may be posted in, and how many posts had been answered when it last failed."""

    largest: int
    answered: int


class Suspects:
    """The rows that were in a batch that failed as a whole, and not answered since."""

    def __init__(self) -> None:
        self._rows: dict[str, Suspicion] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def halve(self, batch: Sequence[ClaimedRow], answered: int) -> None:
        """Suspect each row of `batch`, which failed when `answered` posts had been answered."""
        suspicion = Suspicion(max(1, len(batch) // 2), answered)
        for row in batch:
            self._rows.pop(row.row_id, None)
            self._rows[row.row_id] = suspicion
        for row_id in list(self._rows)[: max(0, len(self._rows) - MOST_SUSPECTS)]:
            del self._rows[row_id]

    def clear(self, batch: Iterable[ClaimedRow]) -> None:
        """Forget the rows of a batch that was answered."""
        if self._rows:
            for row in batch:
                self._rows.pop(row.row_id, None)

    def to_blame(self, batch: Sequence[ClaimedRow], answered: int) -> bool:
        """Tell whether `batch` itself makes its request fail, not the broker.

        It does where every row has failed before and the broker has answered other posts since.
        """
        found = [self._rows.get(row.row_id) for row in batch]
        return all(suspicion is not None and suspicion.answered < answered for suspicion in found)

    def divide(self, rows: Sequence[ClaimedRow]) -> list[list[ClaimedRow]]:
        """Split claimed rows into batches that no suspect is too large for; those beyond suspicion come first."""
        groups: dict[int, list[ClaimedRow]] = {}
        for row in rows:
            suspicion = self._rows.get(row.row_id)
            groups.setdefault(suspicion.largest if suspicion else _ANY_SIZE, []).append(row)
        return [batch for size in sorted(groups, reverse=True) for batch in _chunks(groups[size], size)]


def _chunks(rows: list[ClaimedRow], size: int) -> Iterator[list[ClaimedRow]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
