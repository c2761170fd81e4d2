"""The member's bearer token: kept in a file, read again when the file changes, never logged."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from broker_client.failures import Failure, RequestFailed

MAX_TOKEN_BYTES = 4096


class TokenFile:
    """A token in a file that an operator, or systemd, may replace at any moment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._token = ""
        self._changes = 0

    def changes(self) -> int:
        """Return how many different versions of the file have been read; raises as `read` does."""
        self.read()
        return self._changes

    def read(self) -> str:
        """Return the token as the file holds it now.

        Raises `RequestFailed` (`NOT_PERMITTED`) where the file is missing, empty, not a token, or open to everybody.
        """
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns, status.st_size)
            if version != self._seen:
                self._token, self._seen = _load(self._path, status), version
                self._changes += 1
        except OSError as error:
            raise _unusable(f"cannot read the token file {self._path}: {error.strerror}") from error
        return self._token


def _load(path: Path, status: os.stat_result) -> str:
    if not stat.S_ISREG(status.st_mode):
        raise _unusable(f"the token file {path} is not a plain file")
    if status.st_mode & stat.S_IRWXO:
        raise _unusable(f"the token file {path} is open to every user: chmod 600 it")
    with path.open("rb") as file:
        token = file.read(MAX_TOKEN_BYTES + 1).strip()
    if not token or len(token) > MAX_TOKEN_BYTES or not all(0x21 <= byte <= 0x7E for byte in token):  # noqa: PLR2004 - visible ASCII
        raise _unusable(f"the token file {path} does not hold a token: one word of visible ASCII")
    return token.decode("ascii")


def _unusable(sentence: str) -> RequestFailed:
    return RequestFailed.because(Failure.NOT_PERMITTED, sentence)
