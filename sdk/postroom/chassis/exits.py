"""Exit codes, the same for every program (docs/contract/operate.md#operate-14), from 64 up as in sysexits.h.

`Finding` is what a check found: the answer of `daemon check` and of `doctor`. `replace_closed_streams` is for a start.
"""

import os
import sys
from enum import IntEnum
from typing import Final, Literal

import msgspec


class Exit(IntEnum):
    """Why a process ended."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    UNAVAILABLE = 69
    IO_ERROR = 74
    TRY_AGAIN = 75
    NOT_PERMITTED = 77
    CONFIG = 78


EXIT_OF: Final = {
    "InvalidMessage": Exit.USAGE,
    "NotPermitted": Exit.NOT_PERMITTED,
    "NotFound": Exit.NOT_FOUND,
    "Conflict": Exit.CONFLICT,
    "TryAgain": Exit.TRY_AGAIN,
    "Unavailable": Exit.UNAVAILABLE,
}
"""The exit code of each kind of `postroom.errors`; by name, since some come from other processes as text."""


class Fatal(Exception):
    """Ends the process with `exit_code` and one sentence that says what happened and what to do."""

    def __init__(self, exit_code: Exit, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code

    def report(self, program: str) -> int:
        """Write what ended `program` to standard error, if that can be written; returns the exit code."""
        replace_closed_streams()
        write_last(f"{program}: {self}\n")
        return int(self.exit_code)


def write_last(text: str) -> None:
    """Write to standard error at the end of the process, if that can be written.

    What it cannot write, as on a full disk, it drops, since Python would end with 120 in place of the exit code.
    """
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):  # users' code has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def replace_closed_streams() -> None:
    """Give a closed standard stream a descriptor of its own, so that no socket lands there.

    Reading a closed input and writing to a closed output then fail with `EBADF`; what would go to a closed
    standard error is dropped.
    """
    for number, flags in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_RDWR)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, flags)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - lives as long as the process
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


class Finding(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that was checked: `ok`, or what is wrong and what to do about it (`remedy`)."""

    subject: str
    verdict: Literal["ok", "warning", "failed"]
    detail: str
    remedy: str | None = None
