"""Clears up after a test session that was killed: `python janitor.py DIRECTORY` waits for the end of its input.

Whatever a session starts ends with it by itself, but for what `postroom up --detach` leaves running on purpose, and
the shell that types the commands of a page. They are found by the pid files of supervisors below the directory, and by
a home below it; they are ended, and the directory removed.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from embedded import ProcessIdentity
from embedded.server import wait_until

_STEPS = ((signal.SIGTERM, 60.0), (signal.SIGKILL, 10.0))
_SECONDS = 60.0  # a server that loses its session ends within one


@contextmanager
def clearing_up(directory: Path) -> Iterator[None]:
    """Have a process of its own wait for the end of this one, for the length of a block."""
    command = [sys.executable, __file__, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as janitor:
        try:
            yield
        finally:
            janitor.kill()


def clear_up(directory: Path) -> None:
    """End every process that lives below the directory, then `remove` it: a shell would start another supervisor."""
    while living := _living_in(directory):
        for process in living:
            process.end(*_STEPS)
    remove(directory)


def remove(directory: Path) -> None:
    """End every supervisor below the directory, which takes its programs along, and remove the directory."""
    for file in directory.rglob("up.pid"):
        supervisor = ProcessIdentity.read(file)
        if supervisor is not None:
            supervisor.end(*_STEPS)
    wait_until(lambda: _removed(directory), _SECONDS)


def _living_in(directory: Path) -> list[ProcessIdentity]:
    """Return the processes that have a home below the directory, the oldest first."""
    home = f"HOME={directory}/".encode()
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if any(each.startswith(home) for each in (process / "environ").read_bytes().split(b"\0")):
                pids.append(int(process.name))
    found = [ProcessIdentity.of(pid) for pid in pids]
    return sorted((each for each in found if each is not None), key=lambda each: each.started)


def _removed(directory: Path) -> bool:
    """Try to remove the directory: a server that is about to end may still write into it."""
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


if __name__ == "__main__":
    sys.stdin.read()  # ends with the owner, who alone holds the other end
    clear_up(Path(sys.argv[1]))
