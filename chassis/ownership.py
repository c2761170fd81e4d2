"""Whose files and directories are, whoever makes them and under whatever umask."""

from __future__ import annotations

import os
from pathlib import Path


def private_directory(directory: Path) -> None:
    """Create a directory for this user alone (0700); parents that are missing too are for nobody else to write to.

    Whoever can write to a parent can put another directory in the place of this one. Raises `OSError`.
    """
    for parent in reversed(directory.parents):
        if not parent.exists():
            parent.mkdir(mode=0o755, exist_ok=True)
    directory.mkdir(mode=0o700, exist_ok=True)


def hand_over(fd: int, directory: Path) -> None:
    """Give an open file to the owner of the directory that it lies in; only root can, and only root needs to.

    What root writes for a daemon is the daemon's, which runs as another user and has to open it.
    """
    if os.geteuid() == 0:
        owner = directory.stat()
        os.fchown(fd, owner.st_uid, owner.st_gid)
