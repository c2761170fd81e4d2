"""What every act of the demo works with: the processes, the handler, what was told, and a way to wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cli.demo.programs import DemoStack
from cli.demo.receiver import Receiver
from cli.demo.reckoning import Told
from cli.demo.stage import Stage
from postroom import Client
from postroom.chassis.exits import Exit, Fatal

PATIENCE: Final = 60.0  # seconds that a client keeps trying while a process is away
WAIT_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.1


class Scene:
    """One run's stack, its handler, and where it shows what it does."""

    def __init__(self, stack: DemoStack, stage: Stage, receiver: Receiver) -> None:
        self.stack = stack
        self.stage = stage
        self.receiver = receiver
        self.told = Told()

    def client(self) -> Client:
        """Return a client that outlives a daemon."""
        return Client(self.stack.layout.socket, patience=PATIENCE)

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds; raises `Fatal` where it does not come to that."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise Fatal(Exit.FAILED, f"waited {WAIT_SECONDS:.0f} s {what}, in vain")
            time.sleep(_POLL_SECONDS)
