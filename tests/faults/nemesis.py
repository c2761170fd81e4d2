"""What strikes: the disk and the clock of a program (a shim that is built here), and what befalls a server.

Kills and stops are a `Process`'s own (`mailroom.py`). What cannot be had on a machine raises `Lacking` with its name.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import enum
import mmap
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Final, Self

from embedded.server import EmbeddedServer
from faults.campaign import Lacking

_SOURCE: Final = Path(__file__).with_name("shim.c")
_TEXT: Final = 512  # bytes of a path
_END_SECONDS: Final = 10.0
_CHUNK: Final = 65536  # bytes


class Strike(enum.IntEnum):
    """What becomes of an operation on a file."""

    KILL_BEFORE = 1
    KILL_HALFWAY = 2
    EIO = 3
    ENOSPC = 4
    FULL = 5  # ENOSPC for what needs space, as a disk gives it that has none


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


def killed(server: EmbeddedServer) -> None:
    """End a server as a crash does; it is gone when this returns."""
    process = server.process
    assert process is not None
    process.end((signal.SIGKILL, _END_SECONDS))


class Line:
    """A line to a server on a Unix socket or a port of loopback: it may be slow, and it may be cut."""

    def __init__(self, there: Path | int, here: Path | int, *, delay: float = 0.0) -> None:
        self.here = here
        self._there = there
        self._delay = delay  # seconds, on the way back
        self._server: asyncio.Server | None = None
        self._transports: set[asyncio.BaseTransport] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.mend()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def mend(self) -> None:
        """Let programs connect."""
        if isinstance(self.here, Path):
            self.here.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, self.here)
        else:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.here)

    async def cut(self) -> None:
        """Break every connection, and refuse new ones."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for transport in self._transports:
            transport.abort()  # type: ignore[attr-defined]
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if isinstance(self._there, Path):
                far_reader, far_writer = await asyncio.open_unix_connection(self._there)
            else:
                far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._there)
        except OSError:
            writer.transport.abort()
            return
        ends = {writer.transport, far_writer.transport}
        self._transports |= ends
        pumps = {
            asyncio.create_task(_pump(reader, far_writer, 0.0)),
            asyncio.create_task(_pump(far_reader, writer, self._delay)),
        }
        self._pumps |= pumps
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.abort()
        await asyncio.wait(pumps)
        self._transports -= ends
        self._pumps -= pumps


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # the other: uvloop's word for a transport that was aborted
        while data := await reader.read(_CHUNK):
            if delay:
                await asyncio.sleep(delay)
            writer.write(data)
            await writer.drain()
