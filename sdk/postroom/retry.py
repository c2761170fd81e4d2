"""Trying again: exponential backoff with full jitter, `Retry-After`, and a deadline that ends it with the error.

What is tried again carries the id it was first tried with, so a try whose answer was lost can't become two messages.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from postroom.errors import PostroomError
from postroom.peer import NEVER_ARRIVED

T = TypeVar("T")

FIRST_PAUSE: Final = 0.05  # seconds; doubles
LONGEST_PAUSE: Final = 5.0  # seconds


class Patience:
    """How long to go on trying: `pause` waits before the next try, or raises the error once `seconds` are over.

    `restart` says that something went well: the time and the backoff begin anew.
    """

    def __init__(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self.restart()

    def restart(self) -> None:
        """Begin anew."""
        self._deadline = self._clock() + self._seconds
        self._tries = 0

    def remaining(self) -> float:
        """Return the seconds that are left, never less than 0."""
        return max(0.0, self._deadline - self._clock())

    async def pause(self, error: PostroomError) -> None:
        """Wait before the next try; raises `error` where trying again can't help, or there is no time left."""
        seconds = self._next_pause(error)
        if not error.retryable or seconds >= self.remaining():
            raise error
        self._tries += 1
        await self._sleep(seconds)

    def _next_pause(self, error: PostroomError) -> float:
        backoff = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self._tries, 10)) * self._jitter()
        return max(backoff, error.problem.retry_after or 0.0)


async def retrying(attempt: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """Run `attempt` until it succeeds, fails for good, or `patience` ends."""
    while True:
        try:
            return await attempt()
        except PostroomError as error:
            await patience.pause(error)


async def retrying_unless_arrived(attempt: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """Run `attempt` again only where the peer refused it or it reached nobody: a verb must not run twice."""
    while True:
        try:
            return await attempt()
        except PostroomError as error:
            if error.code == "outcome_unknown" or not (error.code in NEVER_ARRIVED or error.problem.retry_after):
                raise
            await patience.pause(error)
