"""The files of one session of tests: a short path where the unprivileged Postgres of root may pass, gone at the end.

Those of the servers that its tests share lie in memory, where the machine lends enough of it as a file system: they
need not outlive anything, and to make and remove hundreds of databases on a disk is more work than the tests are. What
a test kills, restarts or fills lies on the disk.

What a session that was killed left behind its janitor removes; what a killed janitor left, the next session.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from embedded import ProcessIdentity
from support.janitor import clearing_up

_PREFIX = "postroom-test-"
_OWNER = "session.pid"
_MEMORY = Path("/dev/shm")  # noqa: S108 - what is made there is private
_ENOUGH_BYTES = 4 * 2**30  # for the servers of several workers, whose Postgres keeps up to 1 GB of log


def in_memory() -> Path | None:
    """Return where files lie in memory; None where there is little room, or programs may not be run."""
    if not _MEMORY.is_dir():
        return None
    found = os.statvfs(_MEMORY)
    fits = found.f_bavail * found.f_frsize >= _ENOUGH_BYTES and not found.f_flag & os.ST_NOEXEC
    return _MEMORY if fits and os.access(_MEMORY, os.W_OK) else None


@contextmanager
def session_directory(parent: Path | None = None) -> Iterator[Path]:
    """Make a directory for the length of the block, among the machine's temporary files unless below `parent`."""
    parent = parent or Path(tempfile.gettempdir())
    _sweep(parent)
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    directory.chmod(0o711)
    owner = ProcessIdentity.of(os.getpid())
    assert owner is not None
    owner.write(directory / _OWNER)
    try:
        with clearing_up(directory):
            yield directory
    finally:
        shutil.rmtree(directory)


def _sweep(parent: Path) -> None:
    """Remove what sessions left behind that were killed."""
    for directory in parent.glob(f"{_PREFIX}*"):
        owner = ProcessIdentity.read(directory / _OWNER)
        if owner is not None and not owner.alive:
            shutil.rmtree(directory, ignore_errors=True)
