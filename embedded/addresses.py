"""Where embedded servers listen: ports of loopback, and Unix sockets below a directory of any length."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from embedded.processes import EmbeddedError

MAX_ADDRESS_BYTES = 107  # of a Unix socket (unix(7)); a path may hold more


def is_free(port: int) -> bool:
    """Say whether a server may listen on a port of loopback; asked for any port (0, -1), it says no."""
    if port <= 0:
        return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def socket_directory(directory: Path, longest_name: str, owner: int | None = None) -> Path:
    """Return where sockets with names up to `longest_name` go: `directory`, or a short stand-in for it.

    The stand-in lies in the directory for temporary files, is the same at every call, and is `owner`'s alone (a uid;
    this user's unless given). A stranger's in its place is an `EmbeddedError`.
    """
    if _fits(directory / longest_name):
        return directory
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"postroom-{os.getuid()}-{digest}"
    if not _fits(short / longest_name):
        raise EmbeddedError(
            f"{directory} is too long for a Unix socket ({MAX_ADDRESS_BYTES} bytes): choose a shorter one"
        )
    wanted = os.getuid() if owner is None else owner
    try:
        short.mkdir(mode=0o700)
        os.chown(short, wanted, -1)
    except FileExistsError:
        pass
    status = short.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != wanted:
        raise EmbeddedError(f"{short} belongs to another user: remove it, or choose a shorter directory")
    return short


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= MAX_ADDRESS_BYTES
