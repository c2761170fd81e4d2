"""Where a daemon's socket is: `POSTROOM_SOCKET`, else the only one there is (docs/contract/send.md#send-1)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from postroom.errors import Unavailable

SYSTEM_DIRECTORY: Final = Path("/run/postroom")
MAX_SOCKET_PATH: Final = 107  # bytes; sockaddr_un leaves no room for more


def find_socket(socket: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return `socket`, else `POSTROOM_SOCKET`, else the only socket that lies where daemons put theirs.

    Raises `Unavailable` that says what to set or to start where there is none, or more than one.
    """
    if named := socket or environ.get("POSTROOM_SOCKET"):
        return _checked(Path(named))
    directories = list(socket_directories(environ))
    found = [file for directory in directories for file in _sockets(directory)]
    if len(found) == 1:
        return found[0]
    if found:
        choice = ", ".join(map(str, found))
        raise _unavailable("socket_ambiguous", f"several daemons run here: set POSTROOM_SOCKET to one of {choice}")
    places = " or ".join(map(str, directories))
    raise _unavailable(
        "daemon_absent", f"there is no daemon's socket in {places}: start one (`postroom up`), or set POSTROOM_SOCKET"
    )


def socket_directories(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Name the directories where daemons put their sockets: the user's, then the system's."""
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "postroom"
    yield SYSTEM_DIRECTORY


def _sockets(directory: Path) -> list[Path]:
    try:
        return sorted(file for file in directory.glob("*.sock") if file.is_socket())
    except OSError:
        return []  # a directory that can't be read holds no socket for us


def _checked(socket: Path) -> Path:
    length = len(os.fsencode(socket))
    if length > MAX_SOCKET_PATH:
        raise _unavailable(
            "socket_path_too_long", f"the socket path has {length} bytes, the limit is {MAX_SOCKET_PATH}: {socket}"
        )
    return socket


def _unavailable(code: str, detail: str) -> Unavailable:
    return Unavailable.of(503, code, detail, retryable=code == "daemon_absent")
