"""The daemon as a process: configured, started, signalled, and asked over its socket."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.zygote import Forked, Zygote

SECONDS = 30.0  # how long a slow machine may need
ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)  # a service manager hands its socket over here, and names the process by its pid
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2], sys.argv[2:])
"""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(SECONDS)
        self.sock.connect(str(self._path))


class DaemonProcess:
    """One daemon: `config` may be changed before `start`; `environ` is added to the environment."""

    def __init__(self, directory: Path, zygote: Zygote) -> None:
        self._zygote = zygote
        self.directory = directory
        self.socket = directory / "demo.sock"
        self.state = directory / "state"
        self.file = directory / "daemon.toml"
        self.log = directory / "log"
        self.lines: dict[str, list[str]] = {"": [], "socket": [], "tcp": [], "relay": [], "outbox": []}
        self.environ: dict[str, str] = {}
        self.inherit: list[socket.socket] = []
        self.process: subprocess.Popen[bytes] | Forked | None = None
        token = directory / "token"
        token.write_text("a-token-of-the-broker")
        token.chmod(0o600)
        self.lines[""] += ['mesh = "demo"', f'state_directory = "{self.state}"', "stop_seconds = 2.0"]
        self.lines["socket"].append(f'path = "{self.socket}"')
        self.lines["broker"] = ['url = "http://127.0.0.1:9"', f'token_file = "{token}"']

    def write(self) -> None:
        tables = [f"[{name}]\n" * bool(name) + "\n".join(lines) for name, lines in self.lines.items()]
        self.file.write_text("\n".join(tables))

    def start(self, *, umask: int | None = None) -> DaemonProcess:
        """Start the process, without waiting for it; one that inherits something is not forked."""
        self.write()
        environ = {**os.environ, **self.environ}
        fds = [sock.fileno() for sock in self.inherit]
        command = [sys.executable, "-m", "daemon", "--config", str(self.file)]
        if fds:
            command = [sys.executable, "-c", ACTIVATE, str(fds[0]), *command]
        with self.log.open("ab") as log:
            if umask is None and not fds:
                self.process = self._zygote.start(command[1:], environ, log, directory=self.directory)
                return self
            mask = 0o022 if umask is None else umask
            self.process = subprocess.Popen(
                command, env=environ, stderr=log, stdout=log, umask=mask, pass_fds=fds, cwd=self.directory
            )
        return self

    def ready(self) -> DaemonProcess:
        """Wait until the daemon accepts."""
        end = time.monotonic() + SECONDS
        while True:
            assert self.process is not None
            assert self.process.poll() is None, self.said()
            with suppress(OSError, http.client.HTTPException):
                if self.ask("GET", "/v1/ready")[0] == 200:
                    return self
            assert time.monotonic() < end, self.said()
            time.sleep(0.01)

    def ended(self) -> int:
        """Wait for the process to end, and return its exit code."""
        assert self.process is not None
        return self.process.wait(SECONDS)

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.ended()

    def ask(self, method: str, target: str, body: Any = None) -> tuple[int, Any]:
        connection = UnixConnection(self.socket)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, target, data, {"Content-Type": "application/json"} if data else {})
            answer = connection.getresponse()
            text = answer.read()
            return answer.status, json.loads(text) if answer.headers.get_content_subtype().endswith("json") else text
        finally:
            connection.close()

    def send(self, identifier: str, **message: Any) -> int:
        return self.ask("POST", "/v1/send", {"to": "topic:orders", "client_message_id": identifier, **message})[0]

    def said(self) -> str:
        """Return everything that the process wrote."""
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def daemon(short_directory: Path, zygote: Zygote) -> Iterator[DaemonProcess]:
    process = DaemonProcess(short_directory, zygote)
    yield process
    if process.process is not None and process.process.poll() is None:
        process.process.kill()
        process.process.wait()


@pytest.fixture
def second(daemon: DaemonProcess, zygote: Zygote) -> Iterator[DaemonProcess]:
    """A second daemon in the same directory, with the same config."""
    process = DaemonProcess(daemon.directory, zygote)
    yield process
    if process.process is not None and process.process.poll() is None:
        process.process.kill()
        process.process.wait()


@pytest.fixture
def service_manager(daemon: DaemonProcess) -> Iterator[Callable[[str], str]]:
    """A service manager's ear: waits for a notification that holds the given text."""
    path = daemon.directory / "notify.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(str(path))
        ear.settimeout(SECONDS)
        daemon.environ["NOTIFY_SOCKET"] = str(path)

        def hear(text: str) -> str:
            while True:
                said = ear.recv(4096).decode()
                if text in said:
                    return said

        yield hear
