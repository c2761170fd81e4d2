"""Finds the one message that makes every batch with it fail, by halving (docs/contract/send.md#send-64).

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
        self._forget_the_oldest()
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

    def _forget_the_oldest(self) -> None:
        for row_id in list(self._rows)[: max(0, len(self._rows) - MOST_SUSPECTS)]:
            del self._rows[row_id]


def _chunks(rows: list[ClaimedRow], size: int) -> Iterator[list[ClaimedRow]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
