"""The files of one session of tests: a short path where the unprivileged Postgres of root may pass, gone at the end.

They lie in memory, where the machine lends enough of it as a file system and `TMPDIR` names no other place: to make and
remove thousands of databases on a disk, and to wait for each of their commits, takes longer than the tests do. What a
killed program has written is there as it is on a disk. Only a power cut would tell them apart, and no test makes one.

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
_ENOUGH_BYTES = 4 * 2**30  # for several workers, which take up to 2 GB together


@contextmanager
def session_directory(parent: Path | None = None) -> Iterator[Path]:
    """Make a directory for the length of the block, in `parent` if one is named."""
    parent = parent or _place()
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


def _place() -> Path:
    if "TMPDIR" not in os.environ and _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK):
        found = os.statvfs(_MEMORY)
        if found.f_bavail * found.f_frsize >= _ENOUGH_BYTES and not found.f_flag & os.ST_NOEXEC:
            return _MEMORY
    return Path(tempfile.gettempdir())


def _sweep(parent: Path) -> None:
    """Remove what sessions left behind that were killed."""
    for directory in parent.glob(f"{_PREFIX}*"):
        owner = ProcessIdentity.read(directory / _OWNER)
        if owner is not None and not owner.alive:
            shutil.rmtree(directory, ignore_errors=True)
