"""The files of one session of tests: a short path where the unprivileged Postgres of root may pass, gone at the end.

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


@contextmanager
def session_directory() -> Iterator[Path]:
    """Make a directory for the length of the block."""
    _sweep()
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    directory.chmod(0o711)
    owner = ProcessIdentity.of(os.getpid())
    assert owner is not None
    owner.write(directory / _OWNER)
    try:
        with clearing_up(directory):
            yield directory
    finally:
        shutil.rmtree(directory)


def _sweep() -> None:
    """Remove what sessions left behind that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = ProcessIdentity.read(directory / _OWNER)
        if owner is not None and not owner.alive:
            shutil.rmtree(directory, ignore_errors=True)
