"""Which message the agent is running now, written down so that it outlives the process.

A process that is killed takes many messages with it that it merely had in hand; only the one that was running may have
been the reason. So its id stands in a file while it runs, and whoever has the next turn finds it there and counts the
attempt. The file is not synced: it has to survive the process, not the power.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from postroom.chassis.exits import Fatal
from postroom.chassis.ownership import open_private
from postroom.chassis.sqlite import exit_after

_BYTES: Final = 4096  # reserved, so that a full disk does not stand in the way of writing
_END: Final = b"\n"
_encode: Final = msgspec.json.Encoder().encode


class Begun(NamedTuple):
    """An attempt that began."""

    message_id: str
    number: int  # 1: the first


_decode: Final = msgspec.json.Decoder(Begun).decode


class Underway:
    """The file beside a store; read and write it in a turn only."""

    def __init__(self, directory: Path, name: str) -> None:
        """Open the file, and reserve its place; raises `OSError`."""
        self._file = open_private(directory / f"{name}.underway")
        os.posix_fallocate(self._file, 0, _BYTES)

    def begin(self, begun: Begun) -> None:
        """Note that this attempt runs from now on, and none before it any more."""
        self._write(_encode(begun) + _END)

    def end(self) -> None:
        """Note that nothing runs."""
        self._write(_END)

    def left_behind(self) -> Begun | None:
        """Return the attempt in which a process ended; what a power cut made of the file is nothing."""
        noted = os.pread(self._file, os.fstat(self._file).st_size, 0).partition(_END)[0]
        try:
            return _decode(noted) if noted else None
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None

    def close(self) -> None:
        """Close the file; it stays."""
        os.close(self._file)

    def _write(self, text: bytes) -> None:
        try:
            os.pwrite(self._file, text, 0)
        except OSError as error:
            raise Fatal(
                exit_after(error), f"writing next to the event store failed: {error}; check the disk"
            ) from error
