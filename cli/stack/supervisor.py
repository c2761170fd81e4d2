"""Keep a stack running: one supervisor a state directory, which starts again what ends and stops all of it at the end.

Every process ends with the supervisor, `kill -9` included (`embedded.tether`). A program that was killed is started
again; one that says its config is wrong (exit code 78), or that ends again and again, ends the supervisor too. Each
program has a budget of its own: a Postgres that takes the worker along must not use up the daemon's.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from chassis.exits import Exit, Fatal
from cli.stack.layout import Layout
from cli.stack.stack import Stack
from embedded import EmbeddedError, EmbeddedServer, ProcessIdentity
from embedded.processes import wait_for_any

_RESTARTS: Final = 5
_RESTART_SECONDS: Final = 60.0
_PAUSE_SECONDS: Final = 0.5  # between a start that failed and the next


@contextmanager
def supervising(layout: Layout) -> Iterator[None]:
    """Be the one supervisor of the state directory; raises `Fatal` where there is one already."""
    layout.create()
    with layout.lock_file.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Fatal(Exit.CONFLICT, f"another `postroom up` works in {layout.state} at this moment") from None
        me = ProcessIdentity.of(os.getpid())
        if me is not None:
            me.write(layout.pid_file)
        try:
            yield
        finally:
            layout.pid_file.unlink(missing_ok=True)


def supervisor_of(layout: Layout) -> ProcessIdentity | None:
    """Return the process that supervises the state directory, where there is one."""
    process = ProcessIdentity.read(layout.pid_file)
    return process if process is not None and process.alive else None


def keep_running(stack: Stack, say: Callable[[str], None]) -> None:
    """Start again whatever ends; returns only by an exception: `Fatal`, or the interruption."""
    ends: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_RESTARTS))
    while True:
        running = [process for program in stack.programs if (process := program.process) is not None]
        if len(running) == len(stack.programs):  # else one has ended while another was started again
            wait_for_any(running)
        for program in stack.programs:
            if program.process is None:
                _refuse_to_restart(program, ends[program.name])
                say(f"{program.name} ended; it is started again")
                _start_again(program, say)


def _start_again(program: EmbeddedServer, say: Callable[[str], None]) -> None:
    """Start a program; one that does not start is one more end of it, and the others keep running meanwhile."""
    try:
        program.start()
    except EmbeddedError as error:
        say(str(error))
        time.sleep(_PAUSE_SECONDS)


def _refuse_to_restart(program: EmbeddedServer, ends: deque[float]) -> None:
    if program.exit_code == Exit.CONFIG:
        raise Fatal(Exit.CONFIG, f"{program.name} refuses its config; see {program.log_file}")
    ends.append(time.monotonic())
    if len(ends) == _RESTARTS and ends[-1] - ends[0] < _RESTART_SECONDS:
        raise Fatal(Exit.FAILED, f"{program.name} ends again and again; see {program.log_file}")
