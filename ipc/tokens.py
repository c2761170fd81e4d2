"""The local token of the loopback TCP port: a file of mode 0600 that `postroom daemon rotate-token` replaces.

The daemon notices a new file by itself, and takes the token before it for 60 s more, so that a rotation refuses nobody.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import hand_over, private_directory

GRACE_SECONDS: Final = 60.0
_TOKEN_BYTES: Final = 32  # of randomness
_MIN_LENGTH: Final = 16  # characters; an empty or forgotten file must not let everybody in


class LocalToken:
    """The token in `file`, and the one before it while its grace lasts."""

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Read the token; raises `Fatal` (78) where the file cannot be read or others could read it."""
        self._file = file
        self._clock = clock
        self._identity, self._token = _read(file)
        self._previous = ""
        self._previous_until = 0.0

    def matches(self, token: str) -> bool:
        """Tell, in constant time, whether `token` is the current one or one in its grace."""
        self._notice_rotation()
        given = token.encode(errors="surrogateescape")  # as the header had it, were it no UTF-8
        current = hmac.compare_digest(given, self._token.encode())
        before = hmac.compare_digest(given, self._previous.encode()) and self._clock() < self._previous_until
        return current or before

    def _notice_rotation(self) -> None:
        try:
            if _identity(os.stat(self._file)) == self._identity:  # noqa: PTH116 - a microsecond, on every request
                return
            identity, token = _read(self._file)
        except (OSError, Fatal):
            return  # half-way through a rotation, or a file others can read: what was read before stays good
        self._previous, self._previous_until = self._token, identity[2] / 1e9 + GRACE_SECONDS
        self._identity, self._token = identity, token


def rotate(file: Path) -> None:
    """Write a fresh token into `file`, 0600, in one step; raises `Fatal` where the directory is not writable.

    The file belongs to the owner of its directory, so that root may rotate the token of a daemon.
    """
    try:
        private_directory(file.parent, may_be_anothers=True)
        fd, name = tempfile.mkstemp(prefix=".token-", dir=file.parent)  # 0600 from the start
        with os.fdopen(fd, "w", encoding="ascii") as stream:
            hand_over(stream.fileno(), file.parent)
            stream.write(secrets.token_urlsafe(_TOKEN_BYTES) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(file)
    except OSError as error:
        raise Fatal(Exit.IO_ERROR, f"cannot write the token file {file}: {error.strerror}") from error


def _read(file: Path) -> tuple[tuple[int, int, int], str]:
    try:
        with file.open(encoding="utf-8") as stream:
            status = os.fstat(stream.fileno())
            token = stream.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        detail = f"cannot read the token file {file}: {error}; `postroom daemon rotate-token` writes one"
        raise Fatal(Exit.CONFIG, detail) from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise Fatal(Exit.CONFIG, f"the token file {file} can be read by others: chmod 600 it, and rotate the token")
    if len(token) < _MIN_LENGTH:
        raise Fatal(Exit.CONFIG, f"the token file {file} has no token: `postroom daemon rotate-token` writes one")
    return _identity(status), token


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns
