"""Debian roots for containers, made by debootstrap and kept between runs below `$XDG_CACHE_HOME/postroom/debian`.

Whatever is missing is said in one sentence with what to install. `$POSTROOM_DEBIAN_MIRROR` names another mirror than
debootstrap's own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

BARE = ("git", "make", "python3", "python3-venv")
"""All that a fresh clone needs beside a bare Debian."""

BOOTABLE = (*BARE, "systemd", "systemd-sysv", "dbus", "libpam-systemd")
"""The same with a systemd to boot, and what a user needs to have a service manager of its own."""

_TOOLS = {"debootstrap": "debootstrap", "systemd-nspawn": "systemd-container", "nsenter": "util-linux"}
_VARIABLE = "POSTROOM_DEBIAN_MIRROR"


class MachineMissing(Exception):
    """This machine cannot run containers; the message says what to install or who to be."""


def check_tools() -> None:
    """Raise `MachineMissing` unless this machine can make a Debian root and boot it."""
    packages = sorted({package for tool, package in _TOOLS.items() if shutil.which(tool) is None})
    if packages:
        raise MachineMissing(f"containers need more programs: apt-get install {' '.join(packages)}")
    if os.geteuid() != 0:
        raise MachineMissing("only root can start containers: run it with sudo")


def debian_root(suite: str, packages: Sequence[str]) -> Path:
    """Return a Debian of this suite that has these packages and nothing more; nobody may change it."""
    check_tools()

    def debootstrap(root: Path) -> None:
        mirror = os.environ.get(_VARIABLE)  # without it debootstrap takes its own
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", suite, str(root)]
        command += [mirror] if mirror else []
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode != 0:
            said = "\n".join(done.stdout.splitlines()[-5:])
            source = mirror or "its own mirror"
            raise MachineMissing(f"debootstrap of {suite} from {source} failed (${_VARIABLE} names another):\n{said}")

    return cached(f"{suite}-{digest(*packages)}", debootstrap)


def cached(name: str, make: Callable[[Path], None]) -> Path:
    """Return the directory `name` of the cache, made once: whole or not at all, by one process at a time."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "postroom/debian"
    cache.mkdir(parents=True, exist_ok=True)
    final, draft = cache / name, cache / f"{name}.part"
    with _locked(cache / f"{name}.lock"):
        if not final.exists():
            shutil.rmtree(draft, ignore_errors=True)
            make(draft)
            draft.rename(final)
    return final


def digest(*parts: str | bytes) -> str:
    """Name a set of inputs in eight characters."""
    joined = b"\0".join(part.encode() if isinstance(part, str) else part for part in parts)
    return hashlib.sha256(joined).hexdigest()[:8]


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
