"""Keep a stack running: one supervisor a state directory, which starts again what ends and stops all of it at the end.

Every process ends with the supervisor, `kill -9` included (`embedded.tether`). A program that ends is started again;
one that keeps ending is started ever later, at most after a minute, and the others stay up meanwhile.
"""

import fcntl
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Final

from cli.stack import Stack, module_command
from cli.stack.layout import Layout
from embedded import EmbeddedError, EmbeddedServer, ProcessIdentity
from embedded.processes import wait_for_any
from postroom._wire.retry import Backoff
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import open_private

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STEADY_SECONDS: Final = 60.0  # a program that ran for longer has recovered: its next end is the first again
_MOST_SECONDS: Final = 60.0  # between an end and the next start
_POLL_SECONDS: Final = 0.1
_MAX_NOTIFICATION: Final = 4096  # bytes
_PREFIX: Final = "postroom: "  # of the sentence with which a command ends


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM, or a closed terminal, by the name of the signal."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` in the main thread at the first signal; ignore further ones, so that stopping is finished.

    Under nohup a closed terminal stays ignored. Ctrl-C does not: scripts start what runs in the background without it.
    In another thread this does nothing, since no signal reaches one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    heeded = [number for number in SIGNALS if not (outlives and number == signal.SIGHUP)]
    before = {number: signal.signal(number, _interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.unraisablehook = lambda _: None  # objects interrupted while being built would complain,
    warnings.simplefilter("ignore")  # and coroutines that were never awaited
    raise Interrupted(signal.Signals(number).name)


@contextmanager
def supervising(layout: Layout) -> Iterator[None]:
    """Be the one supervisor of the state directory; raises `Fatal` if there is one already."""
    layout.create()
    with os.fdopen(open_private(layout.lock_file), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fatal(Exit.CONFLICT, f"another `postroom up` is running in {layout.state}") from None
        layout.env_file.unlink(missing_ok=True)  # which says that all is ready: the one there is an earlier start's
        me = ProcessIdentity.of(os.getpid())
        if me is not None:
            me.write(layout.pid_file)
        try:
            yield
        finally:
            layout.pid_file.unlink(missing_ok=True)


def supervisor_of(layout: Layout) -> ProcessIdentity | None:
    """Return the process that supervises the state directory, if there is one."""
    process = ProcessIdentity.read(layout.pid_file)
    return process if process is not None and process.alive else None


def await_ready(layout: Layout, supervisor: ProcessIdentity, say: Callable[[str], None]) -> None:
    """Return once what another `postroom up` starts is ready; raises `Fatal` if that ends before."""
    if not layout.env_file.exists():
        say(f"It writes {layout.env_file} when everything is ready: waiting for that.")
    while not layout.env_file.exists():
        if supervisor.wait(_POLL_SECONDS):
            ended = f"the `postroom up` with pid {supervisor.pid} ended while it started: start again"
            raise Fatal(Exit.TRY_AGAIN, ended)


def keep_running(stack: Stack, say: Callable[[str], None], *, first_seconds: float = 0.5) -> None:
    """Start again each program that ends, until an exception interrupts it.

    A program that ends again and again is started ever later, at first after `first_seconds`; the others stay up.
    """

    def tell(sentence: str) -> None:
        with suppress(OSError):  # on the same disk as the rest, which may be full
            say(sentence)

    watched = [_Watched(program, first_seconds) for program in stack.programs]
    while True:
        running = [process for each in watched if (process := each.program.process) is not None]
        due = [each.due(tell) for each in watched if each.program.process is None]
        if len(running) + len(due) == len(watched):  # else one has ended meanwhile
            wait_for_any(running, max(0.0, min(due) - time.monotonic()) if due else None)
        for each in watched:
            each.start_again(tell)


class _Watched:
    """A program, how often it has ended in a row, and when it may be started again."""

    def __init__(self, program: EmbeddedServer, first_seconds: float) -> None:
        self.program = program
        self._pauses = Backoff(first_seconds, _MOST_SECONDS, least=1.0)  # nothing else waits for what it starts
        self._ends = 0
        self._started = time.monotonic()
        self._due: float | None = None

    def due(self, say: Callable[[str], None]) -> float:
        """Return when the program, which has ended, is started again (monotonic seconds); its end is noted once."""
        if self._due is None:
            now = time.monotonic()
            self._ends = 1 if now - self._started > _STEADY_SECONDS else self._ends + 1
            wait = 0.0 if self._ends == 1 else self._pauses.seconds(self._ends - 1)
            self._due = now + wait
            when = f" in {wait:g} s (end {self._ends} in a row; see {self.program.log_file})" if wait else ""
            say(f"{self.program.name} ended; it is started again{when}")
        return self._due

    def start_again(self, say: Callable[[str], None]) -> None:
        """Start the program if it is due; one that does not start counts as ended once more."""
        if self._due is None or time.monotonic() < self._due:
            return
        self._due = None
        self._started = time.monotonic()
        try:
            self.program.start()
        except EmbeddedError as error:
            say(str(error))


def detached(layout: Layout, say: Callable[[str], None]) -> None:
    """Start `postroom up` in the background, in a session of its own, and return once it is ready.

    It reports by sd_notify(3), so the foreground form may as well be a systemd service of `Type=notify`: READY=1, and
    before that what it is doing, which is passed to `say`. If it ends instead, raises `Fatal` with its last sentence.
    """
    layout.create()
    name = f"postroom-up-{secrets.token_hex(16)}"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications,
        os.fdopen(open_private(layout.log_file, os.O_WRONLY | os.O_TRUNC), "wb") as log,
    ):
        notifications.bind("\0" + name)  # abstract: no file to remove, and a name that cannot be guessed
        supervisor = subprocess.Popen(  # noqa: S603 - our own words, no shell
            module_command("cli", "up", "--state", layout.state),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "NOTIFY_SOCKET": f"@{name}"},
            start_new_session=True,
        )
        try:
            ready = _await_ready(notifications, supervisor, say)
        except BaseException:
            supervisor.terminate()
            supervisor.wait()
            raise
    if not ready:
        code = supervisor.wait()
        if code == Exit.OK:  # by `postroom down`, or a signal
            raise Fatal(Exit.FAILED, f"what starts in {layout.state} was stopped: start it again")
        raise Fatal(Exit(code) if code in set(Exit) else Exit.FAILED, last_words(layout))
    supervisor.returncode = 0  # it goes on running: else subprocess would warn that it was not waited for


def _await_ready(notifications: socket.socket, supervisor: subprocess.Popen[bytes], say: Callable[[str], None]) -> bool:
    ended = os.pidfd_open(supervisor.pid)
    try:
        while True:
            readable, _, _ = select.select([notifications.fileno(), ended], [], [])
            if notifications.fileno() not in readable:
                return False
            for line in notifications.recv(_MAX_NOTIFICATION).decode(errors="replace").splitlines():
                if line == "READY=1":
                    return True
                if line.startswith("STATUS="):
                    say(line.removeprefix("STATUS="))
    finally:
        os.close(ended)


def last_words(layout: Layout) -> str:
    """Return the sentence that ended the supervisor, and the lines that it quotes, from its log."""
    _, ended, said = f"\n{layout.log_file.read_text('utf-8', errors='replace')}".rpartition(f"\n{_PREFIX}")
    return said.rstrip() if ended else f"the supervisor ended without a message; see {layout.log_file}"
