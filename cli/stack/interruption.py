"""Signals that ask a program of the command line to stop: the first one interrupts whatever it does, the rest wait."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM, or the terminal went away."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number  # as shells say it


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` in the main thread at the first signal; ignore further ones, so that stopping is finished."""
    before = {number: signal.signal(number, _interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    sys.unraisablehook = lambda _: None  # what was interrupted while it was being built complains of that
    raise Interrupted(number)
