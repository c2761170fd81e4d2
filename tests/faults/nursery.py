"""Programs started by fork, from a process that has imported them: 30 ms instead of 600, so that each fault gets a run.

As a program, `python -m faults.nursery MODULE …`: imports the modules, then runs one for each line that it reads and
answers with two lines of its own: the pid, and how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import json
import os
import runpy
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from embedded.processes import tethered

_END_WITH_THE_PARENT: Final = 1  # PR_SET_PDEATHSIG


class Nursling:
    """One program that was started here; at most one runs at a time."""

    def __init__(self, pid: int, process: asyncio.subprocess.Process) -> None:
        self.pid = pid
        self._ended = asyncio.create_task(_line(process))

    @property
    def running(self) -> bool:
        return not self._ended.done()

    async def ended(self) -> int:
        """Return how it ended: its exit code, or minus the signal that ended it."""
        return int(await asyncio.shield(self._ended))

    async def kill(self) -> None:
        """End it as a crash would, where it still runs."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        await self.ended()


class Nursery:
    """Starts the programs of `modules`."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log

    async def start(self, module: str, settings: Mapping[str, object], *arguments: str) -> Nursling:
        """Run a module under settings of its own."""
        variables = {name: str(value) for name, value in settings.items()}
        order = {"module": module, "variables": variables, "arguments": arguments, "log": str(self._log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        return Nursling(int(await _line(self._process)), self._process)

    def log(self) -> str:
        return self._log.read_text(errors="replace")


@asynccontextmanager
async def nursery(place: Path, environment: Mapping[str, object], *modules: str) -> AsyncIterator[Nursery]:
    """Keep a nursery for the length of the block; `environment` is that of all its programs."""
    variables = {**os.environ, **{name: str(value) for name, value in environment.items()}}
    command = tethered([sys.executable, "-m", "faults.nursery", *modules])
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=variables)
    try:
        assert await _line(process) == "ready"
        yield Nursery(process, place / "nursery.log")
    finally:
        process.kill()
        await process.wait()


async def _line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    line = await process.stdout.readline()
    return line.decode().strip() or str(-signal.SIGKILL)  # the nursery itself was ended


def _become(module: str, variables: Mapping[str, str], arguments: list[str], log: str) -> None:
    """Be the program, in a process that was just forked."""
    ctypes.CDLL(None).prctl(_END_WITH_THE_PARENT, signal.SIGKILL, 0, 0, 0)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDONLY) if stream == 0 else output, stream)
    os.environ.update(variables)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _serve(modules: list[str]) -> None:
    for module in modules:
        importlib.import_module(module)
    _answer("ready")
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if not child:
            _become(**order)
            sys.exit(0)
        _answer(str(child))
        _answer(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


def _answer(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(sys.argv[1:])
