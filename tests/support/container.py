"""Containers of systemd-nspawn on a Debian root: one command in a pid namespace of its own, or a whole booted systemd.

They share the host's network, and pip inside them uses the host's settings, with the files and directories that those
name bound read-only. A container ends with the process that started it, `kill -9` included.
"""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_BOOT_SECONDS = 90.0
_HALT_SECONDS = 90.0
_NETWORK = frozenset({"http_proxy", "https_proxy", "no_proxy"})


class Settings(NamedTuple):
    """What a container gets from the host: environment variables, and paths to bind read-only at the same place."""

    environment: Mapping[str, str]
    binds: Sequence[Path]


def host_settings() -> Settings:
    """Return pip's settings of this host as variables, its proxies, and every path that they name."""
    environment = {name: value for name, value in os.environ.items() if name.lower() in _NETWORK}
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    for name, value in re.findall(r"^\S+\.([a-z-]+)=('.*'|\".*\")$", listed.stdout, re.MULTILINE):
        environment[f"PIP_{name.upper().replace('-', '_')}"] = ast.literal_eval(value)
    words = " ".join(value for name, value in environment.items() if name.startswith("PIP_")).split()
    paths = [Path(word.removeprefix("file://")) for word in words if word.removeprefix("file://").startswith("/")]
    return Settings(environment, [_outermost(path) for path in paths if path.exists()])


def _outermost(path: Path) -> Path:
    """An index names files beside itself: bind the directory above `simple`."""
    return path.parent if path.name == "simple" else path


def run(root: Path, command: Sequence[str], settings: Settings, options: Sequence[str] = ()) -> int:
    """Run a command in `root`, writing through to the terminal, in a pid namespace of its own; return its exit code."""
    arguments = ["--as-pid2", "--console=pipe", *options, *_shared(settings), "--", *command]
    with subprocess.Popen(_nspawn(root, arguments), stdin=subprocess.DEVNULL) as nspawn:
        try:
            return nspawn.wait()
        finally:
            nspawn.terminate()


class Machine:
    """A booted container."""

    def __init__(self, leader: int) -> None:
        self._leader = leader

    def path(self, inside: str) -> Path:
        """Name a file or socket of the container as the host sees it."""
        return Path(f"/proc/{self._leader}/root{inside}")

    def run(self, *command: str, user: int | None = None, environment: Mapping[str, str] | None = None) -> str:
        """Run a command inside and return what it prints; a failure raises `AssertionError` with all it said."""
        done = self.attempt(*command, user=user, environment=environment)
        assert done.returncode == 0, f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def attempt(
        self, *command: str, user: int | None = None, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside, as root or as a user with no other groups than its own."""
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"] if user is not None else []
        variables = [f"{name}={value}" for name, value in (environment or {}).items()]
        inside = ["env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8", *variables]
        enter = ["nsenter", f"--target={self._leader}", "--all", "--root", "--wd", "--"]
        return subprocess.run([*enter, *as_user, *inside, *command], capture_output=True, text=True, check=False)

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        """Write a file of the container."""
        path = self.path(inside)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(mode)


@contextmanager
def booted(
    root: Path, settings: Settings, binds: Mapping[Path, str], log: Path, more_options: Sequence[str] = ()
) -> Iterator[Machine]:
    """Boot `root` under its own systemd until the block ends; what is written goes to memory, and then away.

    `binds` are bound read-only. Raises `AssertionError` with the end of the console, which goes to `log`, when it
    does not come up.
    """
    options = ["--boot", "--console=passive", "--link-journal=no", "--notify-ready=yes", "--volatile=overlay"]
    options += [*more_options, *(f"--bind-ro={outside}:{inside}" for outside, inside in binds.items())]
    with tempfile.TemporaryDirectory() as directory:
        notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notified.bind(f"{directory}/notify")
        notified.settimeout(_BOOT_SECONDS)
        environment = {"NOTIFY_SOCKET": f"{directory}/notify", "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
        with (
            log.open("w") as console,
            subprocess.Popen(
                _nspawn(root, [*options, *_shared(settings)]),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                env=os.environ | environment,
            ) as nspawn,
        ):
            try:
                with notified:  # closed once it has spoken: a full socket that nobody reads would block the container
                    leader = _leader(notified, log)
                yield Machine(leader)
            finally:
                nspawn.terminate()
                nspawn.wait(_HALT_SECONDS)


def _leader(notified: socket.socket, log: Path) -> int:
    """Wait until the container is up and return the pid of its init; raises `AssertionError`."""
    messages = ""
    try:
        while "READY=1" not in messages:
            messages += notified.recv(4096).decode() + "\n"
    except TimeoutError:
        end = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise AssertionError(f"the container did not come up:\n{end}") from None
    found = re.search(r"X_NSPAWN_LEADER_PID=(\d+)", messages)
    assert found, messages
    return int(found[1])


def _shared(settings: Settings) -> list[str]:
    variables = [f"--setenv={name}={value}" for name, value in settings.environment.items()]
    return variables + [f"--bind-ro={path}" for path in dict.fromkeys(settings.binds)]


def _nspawn(root: Path, arguments: Sequence[str]) -> list[str]:
    """A SIGTERM ends the container too; where nspawn itself is killed, what runs in the container would go on."""
    base = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", f"--directory={root}"]
    return ["setpriv", "--pdeathsig=TERM", *base, *arguments]
