"""Whether a handler can be reached: where it cannot, calls pause, and one at a time finds out when it is back.

A call that reached no handler is not an attempt (docs/contract/delivery.md#delivery-37): a stream must not be buried by
an outage. So the pause, not the number of attempts, is what grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from postroom._wire.retry import STEADY, Backoff

_log = structlog.get_logger(__name__)

PAUSES: Final = Backoff(0.5, 30.0, least=STEADY)  # after calls that found nobody


class Reach:
    """What is known of one handler, from the calls to it."""

    def __init__(
        self,
        name: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` is what the log calls the handler."""
        self.error: str | None = None  # why it cannot be reached; None while it can, as far as is known
        self._name = name
        self._clock = clock
        self._since = 0.0
        self._missed = 0  # calls in a row, of which each found nobody
        self._next = 0.0  # when a call may be tried
        self._trying = False

    @property
    def away_seconds(self) -> float:
        """For how long it has not been reached; 0 while it can be."""
        return 0.0 if self.error is None else self._clock() - self._since

    @property
    def room(self) -> int | None:
        """How many messages are of use now: None sets no limit."""
        if self.error is None:
            return None
        return 0 if self._trying or self._clock() < self._next else 1

    @contextmanager
    def turn(self) -> Iterator[float]:
        """Yield 0 where a call may be made in the block, else the seconds until one may be tried."""
        if self.error is None:
            yield 0.0
        elif self.room:
            self._trying = True
            try:
                yield 0.0
            finally:
                self._trying = False
        else:
            yield max(self._next - self._clock(), PAUSES.first)

    def missed(self, error: str) -> float:
        """Take note of a call that found nobody; return the seconds until the next may be tried."""
        if self.error is None or self._trying:  # what was under way together counts once
            self._since = self._clock() if self.error is None else self._since
            self._missed = 1 if self.error is None else self._missed + 1
            pause = PAUSES.seconds(self._missed)
            self._next = self._clock() + pause
            _log.warning("handler_unreachable", handler=self._name, error=error, pause_seconds=round(pause, 3))
        self.error = error
        return max(self._next - self._clock(), 0.0)

    def reached(self) -> None:
        """Take note of a call that somebody took, whatever the answer."""
        if self.error is not None:
            _log.info("handler_reached", handler=self._name, away_seconds=round(self.away_seconds, 1))
        self.error = None
