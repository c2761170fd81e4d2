"""Whose the files are that root writes for a daemon: the daemon's, which runs as another user and has to open them."""

from __future__ import annotations

import os
from pathlib import Path


def hand_over(fd: int, directory: Path) -> None:
    """Give an open file to the owner of the directory that it lies in; only root can, and only root needs to."""
    if os.geteuid() == 0:
        owner = directory.stat()
        os.fchown(fd, owner.st_uid, owner.st_gid)
