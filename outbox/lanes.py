"""Where a pending row waits: the column `lane` of the outbox, see schema.sql."""

from __future__ import annotations

from typing import Final

from postroom._wire.message import Priority

DUE: Final[dict[Priority, int]] = {"now": 0, "next": 1, "low": 2}  # what a claim takes, in this order
WAITING: Final = 3  # until next_attempt_at
HELD: Final = 4  # until an operator releases it
ALL: Final = (*DUE.values(), WAITING, HELD)


def lane_for(priority: Priority, next_attempt_at: int, now: int) -> int:
    """Return the lane of a pending row that nobody holds; times in ms since the epoch."""
    return WAITING if next_attempt_at > now else DUE[priority]
