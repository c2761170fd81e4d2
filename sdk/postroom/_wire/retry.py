"""Trying again: how long to wait first, `Retry-After`, a deadline that ends it; and an error's text, to be kept.

`Backoff` is the one formula of a delay, with its jitter, for everything that is retried: clients, the relay,
publishers, a consumer's schedule and a message's own policy, connections.

A retry carries the id of the first try, so a try whose answer was lost cannot become two messages.
"""

import math
import random
import time
from collections.abc import Awaitable, Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import Final, NamedTuple, TypeVar

from postroom.errors import PostroomError

NEVER_ARRIVED: Final = frozenset({"daemon_absent", "broker_absent"})  # codes that prove that a request reached nobody
T = TypeVar("T")

RETRY_AFTER_LEAST: Final = 1.0  # second
RETRY_AFTER_MOST: Final = 15 * 60.0  # seconds
STEADY: Final = 0.8  # of a pause that was set for one thing: the rest is enough to separate what failed together
_MOST_CHARACTERS: Final = 1000  # of what is kept of an error
_MOST_LEVELS: Final = 10  # of groups of errors, as in a traceback
_LARGEST_POWER: Final = 40  # beyond it, growing is past every limit and only costs precision


class Backoff(NamedTuple):
    """Pauses that grow: `first` seconds after the first failure, times `factor` with each further one, up to `most`.

    Each is drawn between its share `least` and the whole of it. With 0 the jitter is full, as it has to be where many
    wait for one thing; `STEADY` stays near a pause that a sender or an operator chose.
    """

    first: float
    most: float
    factor: float = 2.0
    least: float = 0.0

    def seconds(self, failures: int, chance: Callable[[], float] = random.random) -> float:
        """Draw the pause after `failures` failures, 1 or more; `chance` gives a number from 0 to 1."""
        longest = min(self.most, self.first * self.factor ** min(max(failures - 1, 0), _LARGEST_POWER))
        return longest * (self.least + (1 - self.least) * chance())


CLIENT: Final = Backoff(0.05, 5.0)


async def _sleep(seconds: float) -> None:
    import asyncio  # noqa: PLC0415 - a command that is answered at once does without it

    await asyncio.sleep(seconds)


class Patience:
    """How long to keep trying: `pause` waits before the next try, or raises the error once `seconds` are over."""

    def __init__(
        self,
        seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = _sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self.restart()

    def restart(self) -> None:
        """Start the time and the backoff over, after a success."""
        self._deadline = self._clock() + self._seconds
        self._failures = 0

    def remaining(self) -> float:
        """Return the seconds that are left, never less than 0."""
        return max(0.0, self._deadline - self._clock())

    async def pause(self, error: PostroomError) -> None:
        """Wait before the next try; raises `error` where trying again can't help, or there is no time left."""
        seconds = max(CLIENT.seconds(self._failures + 1, self._chance), error.problem.retry_after or 0.0)
        if not error.retryable or seconds >= self.remaining():
            raise error
        self._failures += 1
        await self._sleep(seconds)


async def retrying(attempt: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """Run `attempt` until it succeeds, fails permanently, or `patience` ends."""
    while True:
        try:
            return await attempt()
        except PostroomError as error:
            await patience.pause(error)


async def retrying_unless_arrived(attempt: Callable[[], Awaitable[T]], patience: Patience) -> T:
    """Run `attempt` again only where the peer refused it or it never arrived: a verb must not run twice."""
    while True:
        try:
            return await attempt()
        except PostroomError as error:
            if error.code == "outcome_unknown" or not (error.code in NEVER_ARRIVED or error.problem.retry_after):
                raise
            await patience.pause(error)


def clamp_retry_after(seconds: float) -> float:
    """Limit the wait that a peer asked for to 1 s … 15 min."""
    return min(max(seconds, RETRY_AFTER_LEAST), RETRY_AFTER_MOST)


def read_retry_after(header: str | None, now_ms: int) -> float | None:
    """Read a `Retry-After` header, seconds or an HTTP date (RFC 9110 §10.2.3), clamped; None where it is neither."""
    if header is None:
        return None
    try:
        seconds = math.nan if "_" in header else float(header)  # Python reads 1_0 as 10
    except ValueError:
        moment = read_date(header.strip())
        return None if moment is None else clamp_retry_after((moment - now_ms) / 1000)
    return clamp_retry_after(seconds) if math.isfinite(seconds) else None


def read_date(header: str | None) -> int | None:
    """Read an HTTP date (RFC 9110 §5.6.7) as ms since the epoch; None for anything else."""
    if header is None:
        return None
    try:
        moment = parsedate_to_datetime(header)
        return round((moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment).timestamp() * 1000)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def error_text(error: BaseException) -> str:
    """Return the type and the text of any error that a handler raised, of a group those of its members too.

    Characters that Postgres or a log cannot keep become escapes.
    """
    kept = _unescaped(error)[:_MOST_CHARACTERS].encode("utf-8", "backslashreplace").decode()
    return kept.replace("\0", "\\x00")


def _unescaped(error: BaseException, levels: int = _MOST_LEVELS) -> str:
    if levels == 0:
        return "…"
    try:
        text = str(error)
    except BaseException as broken:  # noqa: BLE001 - it is the handler's own code
        text = f"(its text is not available: {type(broken).__name__})"
    if isinstance(error, BaseExceptionGroup):
        text += ": " + "; ".join(_unescaped(each, levels - 1) for each in error.exceptions)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
