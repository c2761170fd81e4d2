"""Programs that start at once: forked from a process that has imported what ours are made of.

To start Python and to import one of our programs takes half a second of a core, most of what a test of kills and
restarts would do. A forked program is a process like any other: its signals, its files and its death are its own. What
it skips is the way from the command line to its first line, which the tests of that program's start take.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Any, Final

_IMPORTED: Final = (
    "daemon.__main__",
    "broker.__main__",
    "broker.server",
    "postroom.worker.process",
    "postroom.worker.config",
)
_MOST_BYTES: Final = 2**18  # of a request: words, and an environment
_PR_SET_PDEATHSIG: Final = 1


class Forked:
    """A program that runs, with what tests use of `subprocess.Popen`."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote
        self._descriptor = os.pidfd_open(pid)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def poll(self) -> int | None:
        return self._end(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._end(None if timeout is None else timeout * 1000)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def _end(self, milliseconds: float | None) -> int | None:
        if self.returncode is None:
            ending = select.poll()
            ending.register(self._descriptor, select.POLLIN)
            if ending.poll(milliseconds):
                self.returncode = self._zygote.ask({"ended": self.pid})
                os.close(self._descriptor)
        return self.returncode


class Piped:
    """One of which tests use what `asyncio.subprocess.Process` has; all that it says is in `stderr`."""

    def __init__(self, process: Forked, stderr: asyncio.StreamReader, transport: asyncio.ReadTransport) -> None:
        self._process = process
        self._transport = transport
        self.stderr = stderr
        self.send_signal, self.kill, self.terminate = process.send_signal, process.kill, process.terminate

    @classmethod
    async def start(cls, words: Sequence[str], environment: Mapping[str, str]) -> Piped:
        """Run what `python WORDS` would."""
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as output:
            process = shared().start(words, environment, output)
        stderr = asyncio.StreamReader()
        connect = asyncio.get_running_loop().connect_read_pipe
        transport, _ = await connect(lambda: asyncio.StreamReaderProtocol(stderr), os.fdopen(reading, "rb"))
        return cls(process, stderr, transport)

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        return await asyncio.to_thread(self._process.wait)

    async def communicate(self) -> tuple[int, bytes]:
        """Return how it ended, and all that it said that nobody has read yet."""
        said = await self.stderr.read()
        self._transport.close()
        return await self.wait(), said


class Zygote:
    """The process that is forked; it ends with the tests, and all that came from it ends with it."""

    def __init__(self) -> None:
        from embedded.processes import tethered  # noqa: PLC0415 - the other side does without

        self._asking = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = tethered([sys.executable, "-P", __file__, str(theirs.fileno())])
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def start(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes],
        *,
        directory: Path | None = None,
    ) -> Forked:
        """Run what `python WORDS` would: a module (`-m`), a text (`-c`) or a file; all it says goes to `output`."""
        place = str(directory or Path.cwd())
        request = {"words": list(words), "environment": dict(environment), "directory": place}
        return Forked(self, self.ask(request, output.fileno()))

    def ask(self, request: Mapping[str, Any], *descriptors: int) -> int:
        with self._asking:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            return int(self._control.recv(_MOST_BYTES))

    def stop(self) -> None:
        self._control.close()
        self._process.wait()


@cache
def shared() -> Zygote:
    """Return the one of this process, which is started when somebody first wants it."""
    zygote = Zygote()
    atexit.register(zygote.stop)
    return zygote


def main(control: socket.socket) -> None:
    """Fork what is asked for, and be that program in the fork."""
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    while True:
        asked, descriptors, _, _ = socket.recv_fds(control, _MOST_BYTES, 1)
        if not asked:
            return None
        request = json.loads(asked)
        if "ended" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["ended"], 0)[1])
        elif (answer := os.fork()) == 0:
            control.close()
            return _become(request["words"], request["environment"], request["directory"], descriptors[0])
        control.send(str(answer).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def end_with_parent() -> None:
    """Have the kernel end this process with the thread that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(words: list[str], environment: dict[str, str], directory: str, output: int) -> None:
    end_with_parent()
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1, errors="backslashreplace")  # a pipe cannot seek
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    os.umask(0o077)  # as of what is tethered
    random.seed()
    sys.path[:0] = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part]
    match words:
        case ["-m", module, *arguments]:
            sys.argv = [module, *arguments]
            sys.modules.pop(f"{module}.__main__", None)  # runpy would warn, on standard error, that it is there
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", text, *arguments]:
            sys.argv = ["-c", *arguments]
            exec(compile(text, "<text>", "exec"), {"__name__": "__main__"})  # noqa: S102 - a test's own
        case [file, *arguments]:
            sys.argv = [file, *arguments]
            runpy.run_path(file, run_name="__main__")


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as control:
        main(control)
