"""Start a supervisor in the background: `postroom up` once more, in a session of its own, until it says READY=1.

It says so by sd_notify(3), so the foreground form may as well be a systemd service of `Type=notify`.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
from typing import Final

from cli.stack.commands import module_command
from cli.stack.layout import Layout
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import open_private

_MAX_NOTIFICATION: Final = 4096  # bytes
_SAID: Final = "postroom: "  # before the sentence with which a command ends


def detached(layout: Layout) -> None:
    """Return when everything is ready; raises `Fatal` with what the supervisor said where it ended instead."""
    layout.create()
    name = f"postroom-up-{secrets.token_hex(16)}"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications,
        os.fdopen(open_private(layout.log_file, os.O_WRONLY | os.O_TRUNC), "wb") as log,
    ):
        notifications.bind("\0" + name)  # abstract: no file to remove, and nobody can guess it
        supervisor = subprocess.Popen(  # noqa: S603 - our own words, no shell
            module_command("cli", "up", "--state", layout.state),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "NOTIFY_SOCKET": f"@{name}"},
            start_new_session=True,
        )
        try:
            ready = _await_ready(notifications, supervisor)
        except BaseException:
            supervisor.terminate()
            supervisor.wait()
            raise
    if not ready:
        raise Fatal(_exit_of(supervisor.wait()), last_words(layout))
    supervisor.returncode = 0  # it lives on: nobody here waits for it


def _await_ready(notifications: socket.socket, supervisor: subprocess.Popen[bytes]) -> bool:
    ended = os.pidfd_open(supervisor.pid)
    try:
        while True:
            readable, _, _ = select.select([notifications.fileno(), ended], [], [])
            if notifications.fileno() not in readable:
                return False
            if b"READY=1" in notifications.recv(_MAX_NOTIFICATION).split(b"\n"):
                return True
    finally:
        os.close(ended)


def _exit_of(code: int) -> Exit:
    return Exit(code) if code in set(Exit) - {Exit.OK} else Exit.FAILED


def last_words(layout: Layout) -> str:
    """Return the sentence that ended the supervisor, as its log has it."""
    lines = layout.log_file.read_text("utf-8", errors="replace").splitlines()
    said = [line.removeprefix(_SAID) for line in lines if line.startswith(_SAID)]
    return said[-1] if said else f"the supervisor ended without a word; see {layout.log_file}"
