"""The processes under measurement: started from their own command lines, tethered to this one, stopped with it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bench.driver import Void
from bench.handler import RECORD
from bench.load import Figures
from embedded.processes import tethered

_READY_SECONDS: Final = 60.0
_PATIENCE: Final = 60.0  # seconds, for what was sent to come
_POLL_SECONDS: Final = 0.01
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_NOBODY: Final = "http://127.0.0.1:9"  # the discard port: a broker that is never there


@contextmanager
def program(
    log: Path,
    *command: str,
    environment: Mapping[str, str] | None = None,
    interpreter: Sequence[str] = (sys.executable, "-m"),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module of ours (or a program without an `interpreter`) while the block lasts, its output in `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own modules
            tethered([*interpreter, *command]),
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
        except urllib.error.HTTPError as refusal:
            refusal.close()
        except OSError:
            pass
        time.sleep(0.05)
    raise TimeoutError(f"{url} does not answer")


def load(
    path: Path, *, connections: int, seconds: float, first: int, random_ids: bool = False, uid: int | None = None
) -> Figures:
    """Run the raw load in a process of its own, as another user where root names one; raises `Void` at any refusal."""
    words: list[object] = ["--socket", path, "--connections", connections, "--seconds", seconds, "--first", first]
    words += ["--random-ids"] if random_ids else []
    words += [] if uid is None else ["--uid", uid]
    return Figures(**json.loads(output_of(["bench.load", *map(str, words)])))


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> bytes:
    """Run `python -m <command>` to its end and return what it printed; raises `Void` with its last words."""
    ran = subprocess.run(  # noqa: S603 - our own modules
        [sys.executable, "-m", *command], capture_output=True, env={**os.environ, **(environment or {})}, check=False
    )
    if ran.returncode:
        said = ran.stderr.decode(errors="replace").strip().splitlines()
        raise Void(f"{command[0]} ended with {ran.returncode}: {said[-1] if said else 'without a word'}")
    return ran.stdout


class Handled:
    """What a handler, in however many processes, has written down: a number and a time for each message."""

    def __init__(self, directory: Path, name: str = "handled") -> None:
        self.file = directory / name
        self.file.touch()
        self.at: dict[int, float] = {}  # number -> when it first came, in seconds since the epoch
        self._read = 0

    def look(self) -> int:
        """Read what was written since, and return how many messages have come."""
        with self.file.open("rb") as stream:
            stream.seek(self._read)
            data = stream.read()
        whole = len(data) - len(data) % RECORD.size
        self._read += whole
        for number, time_ in RECORD.iter_unpack(data[:whole]):
            self.at.setdefault(number, time_)
        return len(self.at)

    async def until(self, count: int) -> None:
        """Return when so many messages have come; raises `Void`."""
        try:
            async with asyncio.timeout(_PATIENCE):
                while self.look() < count:  # noqa: ASYNC110 - other processes write
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError:
            raise Void(f"of {count:,} messages {len(self.at):,} came within {_PATIENCE:g} s") from None


class Meter:
    """What processes use, each with all its children, by the part that they play."""

    def __init__(self, parts: Mapping[str, int]) -> None:
        """`parts` has a pid for each; this process counts without its children."""
        self._parts = parts

    def cpu(self) -> dict[str, float]:
        """Return the seconds of CPU that each part has used so far."""
        families = _families(self._parts)
        return {part: sum(_cpu(pid, part_pid) for pid in families[part]) for part, part_pid in self._parts.items()}

    def wakeups(self) -> dict[str, int]:
        """Return how often the threads of each part have gone to sleep so far, to be woken again."""
        return {part: sum(map(_switches, pids)) for part, pids in _families(self._parts).items()}


def _families(parts: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the processes of each part: the one that is named, and all below it that are no part themselves."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))

    def family(pid: int) -> list[int]:
        below = [child for child in children.get(pid, ()) if child not in parts.values()]
        return [pid, *(each for child in below for each in family(child))]

    return {part: [pid] if pid == os.getpid() else family(pid) for part, pid in parts.items()}


def _cpu(pid: int, head: int) -> float:
    """Return the CPU of one process, and of its children that have ended; of this one without these."""
    if not (fields := _stat(pid)):
        return 0.0
    return sum(map(int, fields[11:13] if head == os.getpid() else fields[11:15])) / _TICKS


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the name, from the state on; none of a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _switches(pid: int) -> int:
    found = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with suppress(FileNotFoundError, ProcessLookupError):
            lines = status.read_text().splitlines()
            found += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found


@contextmanager
def handler(directory: Path, handled: Handled) -> Iterator[tuple[str, int]]:
    """Run a handler behind HTTP that does nothing but write down what came; yields its URL and its pid."""
    port = free_port()
    with program(directory / "handler.log", "bench.handler", str(port), str(handled.file)) as process:
        await_http(f"http://127.0.0.1:{port}/")
        yield f"http://127.0.0.1:{port}/handle", process.pid


def free_port() -> int:
    """Return a port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
