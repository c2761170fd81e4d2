"""Processes that another process may have started: their identity, their pid file, and how to end no other.

A pid does not identify a process, since the kernel reuses it. So a pid file holds the pid, when that process started,
and its boot; nothing is signalled unless all three agree. It also holds which directory it is in: one that came with a
copy of a directory names nobody, since nothing was started from the copy.
"""

import math
import os
import select
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from postroom.chassis.ownership import replace_private

_START_TIME_FIELD = 19  # of /proc/PID/stat behind the name; proc(5) counts it as the 22nd
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class EmbeddedError(Exception):
    """A server could not be started or stopped; the sentence says which one, why, and what to do."""


class Account(NamedTuple):
    """An unprivileged user that a server runs as."""

    uid: int
    gid: int
    name: str


class ProcessIdentity(NamedTuple):
    """One process, and never a later one with its pid: the pid, its start in clock ticks since boot, and the boot."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the identity of the process that has `pid` now (it may be a zombie); None where there is none."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = stat.rpartition(")")[2].split()
        return cls(pid, int(fields[_START_TIME_FIELD]), _BOOT_ID.read_text().strip())

    @classmethod
    def read(cls, file: Path) -> Self | None:
        """Return what a pid file says; None where it is missing, was cut short by a crash, or came with a copy."""
        try:
            pid, started, boot, place = file.read_text("utf-8").split()
            return cls(int(pid), int(started), boot) if place == _place(file) else None
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None

    def write(self, file: Path) -> None:
        """Write the pid file in one step, so that no reader sees half of it."""
        replace_private(file, f"{self.pid} {self.started} {self.boot} {_place(file)}\n")

    @property
    def alive(self) -> bool:
        """Whether this process still runs, even if only with its last thread."""
        return not self.wait(0)

    @contextmanager
    def opened(self) -> Iterator[int | None]:
        """Lend a descriptor of this process, not of another that has its pid by now; None where it has ended."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            yield None
            return
        try:
            yield descriptor if ProcessIdentity.of(self.pid) == self else None
        finally:
            os.close(descriptor)

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to this process; False where it has ended."""
        with self.opened() as descriptor:
            try:
                if descriptor is not None:
                    signal.pidfd_send_signal(descriptor, number)
            except ProcessLookupError:
                return False
        return descriptor is not None

    def wait(self, seconds: float) -> bool:
        """Wait until this process has ended; False where it still runs after `seconds`."""
        with self.opened() as descriptor:
            if descriptor is None:
                return True
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(seconds * 1000))

    def end(self, *steps: tuple[signal.Signals, float]) -> bool:
        """Send each signal in turn and wait its seconds, until the process has ended; return whether it has."""
        return any(not self.send(number) or self.wait(seconds) for number, seconds in steps)


def _place(file: Path) -> str:
    """Identify the directory of a file, whatever its name is by now."""
    status = file.parent.stat()
    return f"{status.st_dev}:{status.st_ino}"


def wait_for_any(processes: Iterable[ProcessIdentity], seconds: float | None = None) -> None:
    """Wait until one of the processes has ended, or for `seconds`; returns at once where one has."""
    with ExitStack() as stack:
        poll = select.poll()
        for process in processes:
            if (descriptor := stack.enter_context(process.opened())) is None:
                return
            poll.register(descriptor, select.POLLIN)
        poll.poll(None if seconds is None else math.ceil(seconds * 1000))


def tethered(
    command: Sequence[str], *, on_death: signal.Signals = signal.SIGKILL, account: Account | None = None
) -> list[str]:
    """Return the command line that runs `command` until this process ends (see `embedded.tether`).

    Start it from the main thread of this process. `on_death` is what the kernel sends it when this process ends.
    """
    uid, gid = (account.uid, account.gid) if account is not None else (-1, -1)
    program = Path(__file__).with_name("tether.py")
    tether = [sys.executable, "-I", "-S", str(program), str(os.getpid()), str(int(on_death)), str(uid), str(gid)]
    return [*tether, *command]


def processes_in(directory: Path) -> Iterator[int]:
    """Yield the pid of every process whose working directory is `directory`, as far as this user may see it."""
    wanted = os.path.realpath(directory)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str((entry / "cwd").readlink()) == wanted:
                    yield int(entry.name)
            except OSError:  # it ended meanwhile, or is another user's
                continue
