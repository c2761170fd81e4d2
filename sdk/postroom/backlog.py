"""The lines of a batch that wait to be sent: filled from the caller's iterable, emptied into one request after another.

Both ends wait for the other, so that a million lines never lie in memory. What a broken connection left unanswered
is given back and goes out first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Final, NamedTuple

MAX_WAITING: Final = 4096  # lines
MAX_CHUNK_LINES: Final = 512
MAX_CHUNK_BYTES: Final = 256 * 1024


class Line(NamedTuple):
    """One line of a batch: its number in the caller's iterable, from 1, and its bytes with the line's end."""

    number: int
    data: bytes


class Backlog:
    """Lines on their way from the caller to the daemon."""

    def __init__(self) -> None:
        self._waiting: deque[Line] = deque()
        self._filled = asyncio.Event()  # a line waits, or no more will come
        self._drained = asyncio.Event()  # there is room
        self._drained.set()
        self._closed = False

    @property
    def waits(self) -> bool:
        """Whether a line waits."""
        return bool(self._waiting)

    @property
    def finished(self) -> bool:
        """Whether no line waits and none will come."""
        return self._closed and not self._waiting

    async def put(self, line: Line) -> None:
        """Add a line once there is room."""
        await self._drained.wait()
        self._waiting.append(line)
        self._update()

    def give_back(self, lines: Iterable[Line]) -> None:
        """Put lines that were taken, and never answered, before all others, in their order."""
        self._waiting.extendleft(reversed(list(lines)))
        self._update()

    def close(self) -> None:
        """Say that no more lines will come, save those that are given back."""
        self._closed = True
        self._update()

    async def filled(self) -> bool:
        """Wait until a line waits (True) or none will come any more (False)."""
        await self._filled.wait()
        return bool(self._waiting)

    def take(self) -> list[Line]:
        """Take as many of the waiting lines as make one chunk; none where none wait."""
        taken: list[Line] = []
        size = 0
        while self._waiting and len(taken) < MAX_CHUNK_LINES and size < MAX_CHUNK_BYTES:
            taken.append(self._waiting.popleft())
            size += len(taken[-1].data)
        self._update()
        return taken

    def _update(self) -> None:
        _set(self._filled, wanted=bool(self._waiting) or self._closed)
        _set(self._drained, wanted=len(self._waiting) < MAX_WAITING)


def _set(event: asyncio.Event, *, wanted: bool) -> None:
    if wanted:
        event.set()
    else:
        event.clear()
