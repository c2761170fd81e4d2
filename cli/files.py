"""Reading a small file that somebody names: a plain file of bounded size, and nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from postroom.chassis.exits import Exit, Fatal

MAX_BYTES: Final = 16 * 1024 * 1024


def read_plain_file(file: Path) -> bytes:
    """Return what a plain file holds; a FIFO, a device or a directory is refused before a byte is read."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise Fatal(Exit.USAGE, f"cannot read {file}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Fatal(Exit.USAGE, f"{file} is not a regular file")
        if status.st_size > MAX_BYTES:
            raise Fatal(Exit.USAGE, f"{file} has {status.st_size} bytes, the limit is {MAX_BYTES}")
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
