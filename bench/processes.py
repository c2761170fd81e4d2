"""The processes under measurement: started from their own command lines, tethered to this one, stopped with it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.load import Figures
from embedded.processes import tethered

_READY_SECONDS: Final = 60.0
_NOBODY: Final = "http://127.0.0.1:9"  # the discard port: a broker that is never there


@contextmanager
def program(
    log: Path, *command: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m <command>` while the block lasts, its output in `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own modules
            tethered([sys.executable, "-m", *command]),
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


@contextmanager
def decode_only(directory: Path) -> Iterator[Path]:
    """Run the server that only decodes; yields its socket."""
    path = directory / "decode.sock"
    with program(directory / "decode.log", "bench.decode_only", str(path)):
        await_socket(path)
        yield path


@contextmanager
def daemon(
    directory: Path,
    *,
    broker: str = _NOBODY,
    token: str = "none",  # noqa: S107
    **more: object,
) -> Iterator[Daemon]:
    """Run a real daemon with its files in `directory`, and `more` settings; without a broker it keeps everything."""
    directory.mkdir(exist_ok=True)
    (directory / "token").touch(mode=0o600)
    (directory / "token").write_text(token)
    settings = {
        "MESH": "demo",
        "STATE_DIRECTORY": directory / "state",
        "SOCKET_PATH": directory / "d.sock",
        "BROKER_URL": broker,
        "BROKER_TOKEN_FILE": directory / "token",
        "OUTBOX_MAX_BYTES": 64 * 2**30,
        "LOG_LEVEL": "error",
        **more,
    }
    environment = {f"POSTROOM_DAEMON_{name}": str(value) for name, value in settings.items()}
    with program(directory / "daemon.log", "daemon", environment=environment) as process:
        await_socket(directory / "d.sock")
        yield Daemon(directory / "d.sock", process.pid)


class Daemon:
    """A running daemon, and what it tells of itself."""

    def __init__(self, path: Path, pid: int) -> None:
        self.socket = path
        self.pid = pid

    def metric(self, name: str) -> float:
        """Return the sum over the labels of one of the daemon's metrics."""
        lines = get(self.socket, "/v1/metrics").decode().splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(values)

    @property
    def commits(self) -> float:
        """Transactions committed so far."""
        return self.metric("postroom_daemon_outbox_commits_total")

    @property
    def resident_bytes(self) -> int:
        """Resident memory of the process."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) * 1024


def await_socket(path: Path) -> None:
    """Return when something accepts connections on `path`; raises `TimeoutError`."""
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on {path}")


def get(path: Path, target: str) -> bytes:
    """GET `target` from a Unix socket and return the body of the answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        with connection.makefile("rb") as answer:
            _, _, body = answer.read().partition(b"\r\n\r\n")
    return body


def await_http(url: str) -> None:
    """Return when `url` answers 200; raises `TimeoutError`."""
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url):  # noqa: S310 - a loopback address of ours
                return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(f"{url} does not answer")


def load(path: Path, *, connections: int, seconds: float, first: int, uid: int | None = None) -> Figures:
    """Run the load in a process of its own, as another user where root names one, and return what it found."""
    words: list[object] = ["--socket", path, "--connections", connections, "--seconds", seconds, "--first", first]
    if uid is not None:
        words += ["--uid", uid]
    return Figures(**json.loads(output_of(["bench.load", *map(str, words)])))


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> bytes:
    """Run `python -m <command>` to its end and return what it printed."""
    ran = subprocess.run(  # noqa: S603 - our own modules
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, env={**os.environ, **(environment or {})}, check=True
    )
    return ran.stdout


@dataclass(frozen=True)
class Calls:
    """What a handler has seen: how many messages, and when the first and the last came (seconds since the epoch)."""

    count: int
    first: float
    last: float


class Handler:
    """A running handler behind HTTP, and what it tells of itself."""

    def __init__(self, base: str) -> None:
        self._base = base
        self.url = f"{base}/handle"

    def calls(self) -> Calls:
        """Return what it has seen so far."""
        return Calls(**self._get("calls"))

    def times(self) -> dict[str, float]:
        """Return when each message came, by its id, in seconds since the epoch."""
        return dict(self._get("times"))

    def _get(self, page: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self._base}/{page}") as answer:  # noqa: S310 - a loopback address of ours
            return dict(json.load(answer))


@contextmanager
def handler(directory: Path) -> Iterator[Handler]:
    """Run a handler that does nothing, as a process of its own."""
    port = free_port()
    with program(directory / "handler.log", "bench.handler", str(port)):
        await_http(f"http://127.0.0.1:{port}/calls")
        yield Handler(f"http://127.0.0.1:{port}")


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
