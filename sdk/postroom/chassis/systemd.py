"""The two systemd protocols a service needs: sd_notify(3) and socket activation, sd_listen_fds(3)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

_FIRST_FD: Final = 3  # SD_LISTEN_FDS_START


def managed(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a service manager wants to hear of this process."""
    return bool(environ.get("NOTIFY_SOCKET"))


def notify(message: str, environ: Mapping[str, str] = os.environ, *, patience: float = 1.0) -> None:
    """Send `READY=1`, `STATUS=…`, `WATCHDOG=1` or `STOPPING=1` to the service manager, if there is one.

    One that does not listen is waited for, for `patience` seconds, and then not told: what is told again and again has
    none, since the loop stands still meanwhile.
    """
    if not managed(environ):
        return
    address = environ["NOTIFY_SOCKET"]
    # What fails: an address that was inherited, as in a container, a manager that restarts or hangs. No reason to end.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(patience)
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.sendall(message.encode())


def watchdog_seconds(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return how often the service manager wants to hear `WATCHDOG=1`, or None where it does not."""
    usec = environ.get("WATCHDOG_USEC")
    return None if usec is None or _is_foreign("WATCHDOG_PID", environ) else int(usec) / 1e6


async def answer_watchdog(interval: float) -> None:
    """Answer every `interval` seconds, for ever; a task, so that a loop that hangs is noticed.

    A server that is away is no reason to die: nobody asks after that here.
    """
    while True:
        notify("WATCHDOG=1", patience=0)
        await asyncio.sleep(interval)


def listen_sockets(environ: Mapping[str, str] = os.environ) -> list[socket.socket]:
    """Return the sockets that the service manager opened for this process, in order; usually none."""
    count = environ.get("LISTEN_FDS")
    if count is None or _is_foreign("LISTEN_PID", environ):
        return []
    return [socket.socket(fileno=fd) for fd in range(_FIRST_FD, _FIRST_FD + int(count))]


def _is_foreign(variable: str, environ: Mapping[str, str]) -> bool:
    return environ.get(variable, str(os.getpid())) != str(os.getpid())
