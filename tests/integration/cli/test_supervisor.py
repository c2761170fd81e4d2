"""The supervisor of `postroom up`: what it starts again, how often, and what does not disturb the others."""

from __future__ import annotations

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.stack.supervisor import keep_running
from embedded import EmbeddedError, ProcessIdentity


class Enough(Exception):
    """Ends the supervisor once the test has seen what it wants."""


class Sleeper:
    """A program that only waits; `on_start` happens while it is started again."""

    exit_code = None
    log_file = Path("none")

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts = 0
        self.on_start = lambda: None
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> ProcessIdentity | None:
        if self._child is None or self._child.poll() is not None:
            return None
        return ProcessIdentity.of(self._child.pid)

    def start(self) -> None:
        self.starts += 1
        self._child = subprocess.Popen(["sleep", "600"])
        if self.starts > 1:
            self.on_start()

    def kill(self) -> None:
        assert self._child is not None
        self._child.kill()
        self._child.wait()


INTERRUPTED = """
import os, signal
from cli.stack.supervisor import Interrupted, interruptible

async def probe():
    pass

try:
    with interruptible():
        asked = probe()
        os.kill(os.getpid(), signal.SIGTERM)
except Interrupted:
    del asked
"""


def test_a_signal_that_interrupts_a_probe_before_it_begins_says_nothing_more() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, check=True, text=True)
    assert ended.stderr == ""


def enough() -> None:
    raise Enough


@pytest.fixture
def programs() -> Iterator[list[Sleeper]]:
    programs = [Sleeper("broker"), Sleeper("daemon")]
    for program in programs:
        program.start()
    yield programs
    for program in programs:
        program.kill()


def supervise(programs: list[Sleeper]) -> list[str]:
    """Keep them running, and return what the supervisor said until it ended."""
    said: list[str] = []
    with pytest.raises(Enough):
        keep_running(SimpleNamespace(programs=programs), said.append, first_seconds=0.01)
    return said


def test_a_program_that_ends_while_another_is_started_again_is_started_too(programs: list[Sleeper]) -> None:
    broker, daemon = programs
    daemon.on_start = broker.kill
    broker.on_start = enough
    daemon.kill()
    supervise(programs)
    assert (broker.starts, daemon.starts) == (2, 2)


def test_a_program_that_ends_again_and_again_is_started_ever_later_and_the_others_stay_up(
    programs: list[Sleeper],
) -> None:
    broker, daemon = programs
    before = daemon.process
    broker.on_start = lambda: broker.kill() if broker.starts < 8 else enough()
    broker.kill()
    said = supervise(programs)
    waits = [float(line.split("again in ")[1].split()[0]) for line in said if "again in" in line]
    assert waits == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32]
    assert (broker.starts, daemon.starts, daemon.process) == (8, 1, before)


def test_each_program_ends_on_its_own_account(programs: list[Sleeper]) -> None:
    broker, daemon = programs
    broker.on_start = lambda: broker.kill() if broker.starts < 3 else daemon.kill()
    daemon.on_start = enough
    broker.kill()
    assert [line for line in supervise(programs) if "daemon" in line] == ["daemon ended; it is started again"]


def test_a_start_that_fails_is_tried_again_and_the_others_keep_running(programs: list[Sleeper]) -> None:
    broker, daemon = programs
    before = daemon.process

    def fail_once() -> None:
        if broker.starts == 2:
            broker.kill()
            raise EmbeddedError("the broker ended by itself")
        enough()

    broker.on_start = fail_once
    broker.kill()
    assert supervise(programs)[1] == "the broker ended by itself"
    assert (broker.starts, daemon.process) == (3, before)


def test_a_supervisor_whose_log_cannot_be_written_keeps_everything_running(programs: list[Sleeper]) -> None:
    broker, _ = programs
    broker.on_start = lambda: broker.kill() if broker.starts < 3 else enough()
    broker.kill()

    def say(_sentence: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Enough):
        keep_running(SimpleNamespace(programs=programs), say, first_seconds=0.01)
    assert broker.starts == 3
