"""The state directory: one owner at a time, and whether the last one stopped cleanly.

`outbox.lock` is held with flock(2) by the process that owns the directory; it holds that process's id until a clean
stop empties it. A lock file with a process id in it that nobody holds means: the last owner was killed.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final

from chassis.exits import Exit, Fatal
from outbox.errors import exit_after

DATABASE: Final = "outbox.db"
LOCK: Final = "outbox.lock"
_PID_WIDTH: Final = 20  # characters: always the same, so that one write replaces another


class StateDirectory:
    """A locked state directory; `unclean` tells that its last owner did not stop in order."""

    def __init__(self, path: Path) -> None:
        """Create the directory (0700) if need be and lock it; raises `Fatal` where somebody else holds it."""
        self._ended = False
        self.database = path.resolve() / DATABASE
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Fatal(exit_after(error), f"cannot use the state directory {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = self._read()
            os.close(self._lock)
            raise Fatal(
                Exit.UNAVAILABLE, f"the state directory {path} is in use by process {owner}: stop it first"
            ) from error
        self.unclean = bool(self._read())

    @property
    def damaged(self) -> Path | None:
        """The file that the last recovery set aside, None where there was none."""
        aside = {file.name.rpartition("-")[2]: file for file in self.database.parent.glob(f"{DATABASE}.damaged-*")}
        times = [time for time in aside if time.isdigit()]  # the others are WALs
        return aside[max(times, key=int)] if times else None

    def begin(self) -> None:
        """Note on disk that the files are open."""
        os.pwrite(self._lock, f"{os.getpid():<{_PID_WIDTH}}".encode(), 0)
        os.fsync(self._lock)

    def end(self, *, clean: bool) -> None:
        """Unlock; a `clean` end says that the files need no check. A second call does nothing."""
        if self._ended:
            return
        self._ended = True
        if clean:
            os.ftruncate(self._lock, 0)
            os.fsync(self._lock)
        os.close(self._lock)

    def _read(self) -> str:
        return os.pread(self._lock, _PID_WIDTH, 0).decode("ascii", "replace").strip()
