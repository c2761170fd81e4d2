"""What strikes: the disk and the clock of a program (a shim that is built here), and what befalls a server.

Kills and stops are a `Process`'s own (`mailroom.py`). What cannot be had on a machine raises `Lacking` with its name.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import shutil
import subprocess
from pathlib import Path
from typing import Final

from faults.campaign import Lacking

_SOURCE: Final = Path(__file__).with_name("shim.c")
_TEXT: Final = 512  # bytes of a path


class Strike(enum.IntEnum):
    """What becomes of an operation on a file."""

    KILL_BEFORE = 1
    KILL_HALFWAY = 2
    EIO = 3
    ENOSPC = 4


class _Control(ctypes.Structure):
    """As `shim.c` has it."""

    _fields_ = (
        ("seen", ctypes.c_int64),
        ("at", ctypes.c_int64),
        ("action", ctypes.c_int64),
        ("for_ever", ctypes.c_int64),
        ("struck", ctypes.c_int64),
        ("clock_offset", ctypes.c_int64),  # ns
        ("directory", ctypes.c_char * _TEXT),
        ("record", ctypes.c_char * _TEXT),
    )


class Shim:
    """The disk below one directory, and the clock, as the programs see them that are started with `environment`."""

    def __init__(self, place: Path, directory: Path) -> None:
        """Build the shim in `place`; raises `Lacking` where there is no C compiler."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            raise Lacking("a C compiler (`apt-get install gcc libc6-dev`)")
        library, control = place / "shim.so", place / "shim.control"
        built = subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"],
            capture_output=True,
            text=True,
            check=False,
        )
        if built.returncode:
            raise Lacking(f"a C compiler that can build {_SOURCE.name}: {built.stderr.strip().splitlines()[-1]}")
        control.write_bytes(bytes(ctypes.sizeof(_Control)))
        with control.open("r+b") as file:
            self._control = _Control.from_buffer(mmap.mmap(file.fileno(), 0))
        self._control.directory = str(directory).encode()
        self.environment: dict[str, object] = {"LD_PRELOAD": library, "POSTROOM_SHIM": control}

    def arm(self, at: int, strike: Strike, *, for_ever: bool = False) -> None:
        """Strike the `at`-th operation from here on (1: the next), and each after it where it is `for_ever`."""
        self._control.at = 0
        self._control.seen = 0
        self._control.struck = 0
        self._control.action = strike
        self._control.for_ever = for_ever
        self._control.at = at

    def lift(self) -> int:
        """Let everything pass from here on; return how often it struck."""
        self._control.at = 0
        return int(self._control.struck)

    def count(self) -> None:
        """Count from zero, and strike nothing."""
        self.arm(0, Strike.EIO)

    @property
    def seen(self) -> int:
        """How many operations there were since `arm` or `count`."""
        return int(self._control.seen)

    @property
    def striking(self) -> bool:
        """Whether it struck since `arm`."""
        return bool(self._control.struck)

    def record(self, file: Path) -> None:
        """Write down every operation from here on; only while no program runs."""
        self._control.record = str(file).encode()

    def set_clock_off(self, seconds: float) -> None:
        """Let the wall clock be so far off."""
        self._control.clock_offset = int(seconds * 1e9)
