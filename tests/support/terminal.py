"""Running `postroom` as a user does: a process with its own streams, environment and, if wanted, a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from unittest.mock import patch

import cli.main

COMMAND = [sys.executable, "-m", "cli"]
SECONDS = 60.0  # after which a command counts as hung


@dataclass
class Outcome:
    """How a command ended and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    def sentence(self) -> str:
        """Return the one sentence that a failed command said; fails where it said more, or a traceback."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("postroom: ")
        assert "Traceback" not in self.err
        return lines[0].removeprefix("postroom: ")


class Terminal:
    """Runs commands against one daemon's socket: in this process, or (`process`, `shell`, `start`) in their own."""

    def __init__(self, socket: Path | None = None, **environment: str) -> None:
        self.environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment}
        if socket is not None:
            self.environment["POSTROOM_SOCKET"] = str(socket)

    def run(self, *arguments: str | Path, stdin: bytes | str = b"") -> Outcome:
        """Run a command to its end in this process, with streams and an environment of its own: quick."""
        with (
            io.TextIOWrapper(tempfile.TemporaryFile()) as typed,
            io.TextIOWrapper(io.BytesIO(), "utf-8") as out,
            io.TextIOWrapper(io.BytesIO(), "utf-8") as err,
        ):
            typed.buffer.write(stdin.encode() if isinstance(stdin, str) else stdin)
            typed.buffer.seek(0)
            with _as_its_own(self.environment, typed, out, err):
                code = cli.main.run([str(each) for each in arguments])
            return Outcome(code, _text(out), _text(err))

    def process(self, *arguments: str | Path, stdin: bytes | str = b"", **options: Any) -> Outcome:
        """Run a command to its end as a process, without a terminal."""
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            env=self.environment,
            timeout=SECONDS,
            check=False,
            **options,
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    def shell(self, script: str) -> Outcome:
        """Run a line of shell in which `postroom` stands for the command."""
        command = " ".join(COMMAND)
        done = subprocess.run(
            ["/bin/bash", "-c", f'postroom() {{ {command} "$@"; }}\n{script}'],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self.environment,
            timeout=SECONDS,
            check=False,
        )
        return Outcome(done.returncode, done.stdout.decode(), done.stderr.decode())

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[bytes]:
        """Start a command and return at once."""
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            bufsize=0,  # a line that is read takes nothing of the next with it
            env=self.environment,
            **streams | options,
        )

    def at_a_terminal(self, *arguments: str, answer: str = "", **environment: str) -> Outcome:
        """Run a command whose streams are a terminal, typing `answer`; both outputs come back as one."""
        master, slave = pty.openpty()
        running = subprocess.Popen(
            [*COMMAND, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**self.environment, "TERM": "xterm", "COLUMNS": "200", **environment},
            start_new_session=True,
        )
        os.close(slave)
        os.write(master, answer.encode())
        output = b""
        while select.select([master], [], [], SECONDS)[0]:
            try:
                piece = os.read(master, 65536)
            except OSError:  # the last of its ends is closed
                break
            output += piece
        os.close(master)
        return Outcome(running.wait(SECONDS), output.decode(), "")


@contextmanager
def _as_its_own(environment: dict[str, str], stdin: TextIO, stdout: TextIO, stderr: TextIO) -> Iterator[None]:
    streams = sys.stdin, sys.stdout, sys.stderr
    sys.stdin, sys.stdout, sys.stderr = stdin, stdout, stderr
    try:
        with patch.dict(os.environ, environment, clear=True):
            yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = streams


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()
