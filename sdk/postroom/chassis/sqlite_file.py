"""An SQLite file that one process owns: its lock, whether the last owner stopped cleanly, and setting it aside.

Beside `<name>.db` lies `<name>.lock`, held with flock(2) by the process that owns the file; it holds that process's id
until a clean stop empties it. A lock file with a process id in it that nobody holds means: the last owner was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Final

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import hand_over, open_private, private_directory
from postroom.chassis.sqlite import PARTS, exit_after

_PID_WIDTH: Final = 20  # characters: always the same, so that one write replaces another


class OwnedFile:
    """A locked `<directory>/<name>.db`; `unclean` tells that its last owner did not stop in order."""

    def __init__(self, directory: Path, name: str, *, may_be_anothers: bool = False) -> None:
        """Create the directory (0700) if need be and take the lock; raises `Fatal` where somebody else holds it.

        The same where others own the directory or may write to it; `may_be_anothers` lets root work for its owner.
        """
        self._ended = False
        self.path = directory.resolve() / f"{name}.db"
        try:
            private_directory(directory, may_be_anothers=may_be_anothers)
            self._lock = open_private(directory / f"{name}.lock")
            if may_be_anothers:
                hand_over(self._lock, directory)
        except OSError as error:
            raise Fatal(exit_after(error), f"cannot use the state directory {directory}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = self._read()
            os.close(self._lock)
            raise Fatal(
                Exit.UNAVAILABLE, f"the state directory {directory} is in use by process {owner}: stop it first"
            ) from error
        self.unclean = bool(self._read())

    @property
    def damaged(self) -> Path | None:
        """The file that was set aside last, None where there is none."""
        aside = {file.name.rpartition("-")[2]: file for file in self.path.parent.glob(f"{self.path.name}.damaged-*")}
        times = [time for time in aside if time.isdigit()]  # the others are WALs
        return aside[max(times, key=int)] if times else None

    def begin(self) -> None:
        """Note on disk that the file is open."""
        os.pwrite(self._lock, f"{os.getpid():<{_PID_WIDTH}}".encode(), 0)
        os.fsync(self._lock)

    def end(self, *, clean: bool) -> None:
        """Unlock; a `clean` end says that the file needs no check. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if clean:
            os.ftruncate(self._lock, 0)
            os.fsync(self._lock)
        os.close(self._lock)

    def _read(self) -> str:
        return os.pread(self._lock, _PID_WIDTH, 0).decode("ascii", "replace").strip()


def set_aside(database: Path, now: int) -> Path:
    """Rename the file with its WAL to `<name>.damaged-<now>` (ms); the name is new, so nothing is ever overwritten."""
    damaged = database.with_name(f"{database.name}.damaged-{now}")
    while damaged.exists():
        now += 1
        damaged = database.with_name(f"{database.name}.damaged-{now}")
    move(database, damaged)
    return damaged


def move(database: Path, destination: Path) -> None:
    """Rename what there is of an SQLite file, the database first: without it nobody opens what is left."""
    for part in PARTS:
        with contextlib.suppress(FileNotFoundError):
            Path(f"{database}{part}").rename(f"{destination}{part}")


def sync(path: Path) -> None:
    """Put a file, or the names in a directory, on disk."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
