"""The supervisor of `postroom up` on programs that end while another one is being started again."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from cli.stack.supervisor import keep_running
from embedded import ProcessIdentity


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
        os.kill(self._child.pid, signal.SIGKILL)
        self._child.wait()


def test_a_program_that_ends_while_another_is_started_again_is_started_too():
    broker, daemon = Sleeper("broker"), Sleeper("daemon")

    def enough() -> None:
        raise Enough

    for program in (broker, daemon):
        program.start()
    try:
        daemon.on_start = broker.kill
        broker.on_start = enough
        daemon.kill()
        with pytest.raises(Enough):
            keep_running(SimpleNamespace(programs=[broker, daemon]), lambda _: None)
        assert (broker.starts, daemon.starts) == (2, 2)
    finally:
        for program in (broker, daemon):
            program.kill()
