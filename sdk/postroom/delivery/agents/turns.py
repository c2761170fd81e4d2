"""Turns: which task of which process of a host may write the event store now.

Processes that run one agent on one host share its store and take turns. A turn is held with flock(2), so the kernel
ends it when its holder is killed. Two locks make it fair: the process that waits for `turn` holds `next`, so that one
that has just finished its turn cannot take the following one before it. What users' code forks has no part in them: a
child that outlives its killed parent would keep the turn.

A file next to the locks names the message that the holder of a turn runs (`begin`). A process that is killed had
many messages in hand, but only the one that was running may have been the reason. The holder of the next turn finds it
in the file and counts the attempt. The file is not synced: it has to survive the process, not a power cut. It also says
that the store was opened, which has its schema since then.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakSet

import msgspec

from postroom.chassis.exits import Fatal
from postroom.chassis.ownership import open_private, private_directory
from postroom.chassis.sqlite import exit_after

_PAUSE: Final = 0.002  # seconds between two looks at a lock that another process holds
_LONG: Final = 90.0  # seconds of a turn: more than `receive` has by default
_BYTES: Final = 4096  # reserved, so that it can be written on a full disk
_END: Final = b"\n"


_open: Final[WeakSet[Turns]] = WeakSet()  # those of this process


def _leave_to_parent() -> None:
    """Close the lock files in a forked child: a lock is held for as long as anybody has its file open."""
    for turns in list(_open):
        turns.close()


os.register_at_fork(after_in_child=_leave_to_parent)


class Begun(NamedTuple):
    """An attempt that began."""

    message_id: str
    number: int  # 1: the first


_decode: Final = msgspec.json.Decoder(Begun).decode


class Turns:
    """The turns at one store, and what their holder runs, which it reads and writes; `close` it at the end."""

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Create the directory (0700) if need be, and the files next to the store; raises `Fatal` if forbidden."""
        self._clock = clock
        self._waits_since: float | None = None
        self._mine = asyncio.Lock()  # serves the tasks of this process in the order they came
        try:
            private_directory(directory)
            self._next, self._turn, self._underway = (
                open_private(directory / f"events.{part}") for part in ("next", "turn", "underway")
            )
            os.posix_fallocate(self._underway, 0, _BYTES)
        except OSError as error:
            raise Fatal(exit_after(error), f"cannot use the state directory {directory}: {error.strerror}") from error
        _open.add(self)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it while the block runs."""
        async with self._mine:
            self._waits_since = self._clock()
            try:
                await _take(self._next)
                try:
                    await _take(self._turn)
                finally:
                    fcntl.flock(self._next, fcntl.LOCK_UN)
            finally:
                self._waits_since = None
            try:
                yield
            finally:
                fcntl.flock(self._turn, fcntl.LOCK_UN)

    @property
    def trouble(self) -> str | None:
        """Return why no turn comes: another process stands still in its own, such as on a full disk."""
        if self._waits_since is None or self._clock() - self._waits_since < _LONG:
            return None
        return f"another process of the agent has held the event store for {_LONG:g} s: look at its health, or stop it"

    @property
    def was_opened(self) -> bool:
        """Whether the store has been open: something was noted then."""
        return _END in self._read()

    def begin(self, begun: Begun) -> None:
        """Note that this attempt runs now, and no earlier one."""
        self._write(msgspec.json.encode(begun) + _END)

    def end(self) -> None:
        """Note that nothing runs."""
        self._write(_END)

    def left_behind(self) -> Begun | None:
        """Return the attempt that a process ended during; None where a power cut damaged the file."""
        noted = self._read().partition(_END)[0]
        try:
            return _decode(noted) if noted else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def close(self) -> None:
        """Close the files; they stay, since removing a lock file lets two processes hold it."""
        _open.discard(self)
        for file in (self._next, self._turn, self._underway):
            os.close(file)

    def _read(self) -> bytes:
        return os.pread(self._underway, os.fstat(self._underway).st_size, 0)

    def _write(self, text: bytes) -> None:
        try:
            os.pwrite(self._underway, text, 0)
        except OSError as error:
            detail = f"writing next to the event store failed: {error}; check the disk"
            raise Fatal(exit_after(error), detail) from error


async def _take(descriptor: int) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_PAUSE)
        else:
            return
