"""Turns: who may write the event store now, among the tasks of a process and the processes of a host.

Processes that run one agent on one host share its store and take turns. A turn is held with flock(2), so the kernel
ends it when its holder is killed. Two locks make it fair: whoever waits for `turn` holds `next`, so that a process that
has just finished its turn cannot take the following one before somebody who waits.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from postroom.chassis.ownership import open_private

_PAUSE: Final = 0.002  # seconds between two looks at a lock that another process holds


class Turns:
    """The turns at one store; `close` it at the end."""

    def __init__(self, directory: Path, name: str) -> None:
        self._mine = asyncio.Lock()  # serves the tasks of this process in the order they came
        self._next = _open(directory / f"{name}.next")
        self._turn = _open(directory / f"{name}.turn")

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it while the block runs."""
        async with self._mine:
            await _take(self._next)
            try:
                await _take(self._turn)
            finally:
                fcntl.flock(self._next, fcntl.LOCK_UN)
            try:
                yield
            finally:
                fcntl.flock(self._turn, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the lock files; they stay, since removing a lock file lets two processes hold it."""
        os.close(self._next)
        os.close(self._turn)


def _open(path: Path) -> int:
    return open_private(path)


async def _take(descriptor: int) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_PAUSE)
        else:
            return
