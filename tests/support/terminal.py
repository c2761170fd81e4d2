"""Running `postroom` as a user does: a process with its own streams, environment and, if wanted, a terminal."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """Runs commands against one daemon's socket."""

    def __init__(self, socket: Path | None = None, **environment: str) -> None:
        self.environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **environment}
        if socket is not None:
            self.environment["POSTROOM_SOCKET"] = str(socket)

    def run(self, *arguments: str | Path, stdin: bytes | str = b"", **options: Any) -> Outcome:
        """Run a command to its end, without a terminal."""
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output="stdout" not in options,
            env={**self.environment, **options.pop("environment", {})},
            timeout=SECONDS,
            check=False,
            **options,
        )
        return Outcome(done.returncode, (done.stdout or b"").decode(), (done.stderr or b"").decode())

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
        return subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.environment,
            **options,
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
