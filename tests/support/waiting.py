"""Waiting for what has no event of its own: it is asked again until it holds, as long as a slow machine may need."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

SECONDS: Final = 60  # far more than anything takes; a test that waits as long has failed
_PAUSE: Final = 0.005  # seconds between two looks


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE)


async def until_so(condition: Callable[[], Awaitable[bool]], seconds: float = SECONDS) -> None:
    """The same for a condition that has to ask a server."""
    async with asyncio.timeout(seconds):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(_PAUSE)
