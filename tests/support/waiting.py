"""Waiting for what has no event of its own: it is asked again until it holds, as long as a slow machine may need."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

T = TypeVar("T")
SECONDS: Final = 60  # far more than anything takes; a test that waits as long has failed
_PAUSE: Final = 0.005  # seconds between two looks
_LONG_PAUSE: Final = 0.05  # the same, where a look is a process or a request


async def until(condition: Callable[[], object], *, pause: float = _PAUSE) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(pause)


async def until_so(
    ask: Callable[[], Awaitable[T]], what: str = "", *, seconds: float = SECONDS, holds: Callable[[T], object] = bool
) -> T:
    """The same for what a server is asked; returns its answer. `what` is named where it does not come to that."""
    try:
        async with asyncio.timeout(seconds) as bound:
            while not holds(answer := await ask()):  # noqa: ASYNC110
                await asyncio.sleep(_PAUSE)
            return answer
    except TimeoutError as error:
        if not bound.expired():
            raise  # of what was asked
        raise TimeoutError(f"after {seconds:.0f} s still not: {what}") from error


def wait_until(
    ask: Callable[[], T], what: str = "", *, seconds: float = SECONDS, holds: Callable[[T], object] = bool
) -> T:
    """The same without a loop."""
    end = time.monotonic() + seconds
    while not holds(answer := ask()):
        assert time.monotonic() < end, f"after {seconds:.0f} s still not: {what or answer}"
        time.sleep(_LONG_PAUSE)
    return answer
