"""Minting `broker_message_id`: ULIDs in the order in which this process accepted, kept as `uuid`.

Ids in time order keep every index append-only. A ULID is 48 bits of milliseconds and 80 bits of randomness; within a
millisecond (and while the clock stands still or goes back) the next id is the last one plus one, as the ULID
specification has it for monotonic ids.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

import ulid
from asyncpg.pgproto.pgproto import UUID

_TIME_BYTES: Final = 6
_RANDOM_BYTES: Final = 10


def now_ms() -> int:
    """Return the wall clock in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


class MessageIds:
    """Mints ids; each is greater than the one before. Clock and randomness are handed in."""

    def __init__(self, clock: Callable[[], int] = now_ms, randomness: Callable[[int], bytes] = os.urandom) -> None:
        self._clock = clock
        self._randomness = randomness
        self._last = 0

    def mint(self, count: int) -> list[UUID]:
        """Return `count` ids in ascending order."""
        fresh = ulid.from_bytes(self._clock().to_bytes(_TIME_BYTES, "big") + self._randomness(_RANDOM_BYTES))
        first = max(fresh.int, self._last + 1)
        self._last = first + count
        return [UUID(number.to_bytes(_TIME_BYTES + _RANDOM_BYTES, "big")) for number in range(first, first + count)]
