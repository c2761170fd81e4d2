"""The sockets that programs listen on: a Unix socket with its final mode from the start, and a loopback TCP one.

A stale socket file is replaced; a live one, a symlink or any other file in the way ends the process with a sentence
(docs/contract/send.md#send-2). Sockets that systemd passes in are used as they are and never come through here.
"""

from __future__ import annotations

import errno
import fcntl
import grp
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import private_directory

MAX_PATH_BYTES: Final = 107  # sockaddr_un.sun_path holds 108 with its closing NUL
BACKLOG: Final = 1024  # connections that wait to be accepted
_LONGEST_WAIT: Final = 2.0  # seconds for others that start in the same directory
_LOOK_AGAIN: Final = 0.005  # seconds
PRIVATE: Final = 0o600
SHARED: Final = 0o660  # with a group


def unix_listener(path: Path, group: str | None = None) -> socket.socket:
    """Listen on `path`, 0600 or (for `group`) 0660, and return the socket; whoever connects waits to be accepted.

    The mode is there when the file appears; the group is set before anyone can connect. Raises `Fatal`.
    """
    refuse_path(path)
    gid = None if group is None else _group_id(group)
    try:
        private_directory(path.parent)
        with _only_starter(path.parent):
            refuse_path(path)
            path.unlink(missing_ok=True)  # nobody answers on it: whoever made it is gone
            return _bind(path, gid)
    except OSError as error:
        raise Fatal(Exit.CONFIG, f"cannot create the socket {path}: {error.strerror}") from error


def loopback_listener(port: int) -> socket.socket:
    """Bind 127.0.0.1:`port` and return the socket; raises `Fatal` where the port is taken."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise Fatal(Exit.UNAVAILABLE, f"cannot listen on 127.0.0.1:{port}: {error.strerror}") from error
    return sock


def refuse_path(path: Path) -> None:
    """Raise `Fatal` where `path` is too long, is no socket, or is one that a running process answers on."""
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        detail = f"the socket path {path} has {length} bytes, the system allows {MAX_PATH_BYTES}: choose a shorter one"
        raise Fatal(Exit.CONFIG, detail)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise Fatal(Exit.CONFIG, f"cannot look at the socket path {path}: {error.strerror}") from error
    if stat.S_ISLNK(mode):
        raise Fatal(Exit.CONFIG, f"{path} is a symbolic link: remove it or configure another path")
    if not stat.S_ISSOCK(mode):
        raise Fatal(Exit.CONFIG, f"{path} is there and is no socket: remove it or configure another path")
    if _is_live(path):
        raise Fatal(Exit.UNAVAILABLE, f"already running: a process answers on {path}")


def remove(path: Path, inode: int) -> None:
    """Remove the socket file `path` where it is still the one with `inode`, not a successor's."""
    with suppress(OSError):
        if path.lstat().st_ino == inode:
            path.unlink()


def _bind(path: Path, gid: int | None) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mode = PRIVATE if gid is None else SHARED
    before = os.umask(0o777 & ~mode)  # bind(2) creates the file with 0777 less the umask
    try:
        sock.bind(str(path))
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(before)
    if gid is not None:
        os.chown(path, -1, gid)  # nobody can have connected: the socket does not listen yet
    sock.listen(BACKLOG)
    return sock


@contextmanager
def _only_starter(directory: Path) -> Iterator[None]:
    """Keep two programs that start at once from taking each other's fresh socket for a stale one.

    They wait for each other, which takes as long as a bind. Who may read the directory can lock it, and need not be a
    program that starts: after a while nobody waits for that.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _LONGEST_WAIT
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOOK_AGAIN)
            else:
                break
        yield
    finally:
        os.close(fd)


def _is_live(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(str(path))
    return code not in (errno.ECONNREFUSED, errno.ENOENT)


def _group_id(group: str) -> int:
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise Fatal(Exit.CONFIG, f"the socket's group: there is no group {group!r} on this machine") from error
