"""A consumer as a process that is killed (-9) at one step: `python crashing_consumer.py FILE STEP COUNT`.

The program's own services run, with one collaborator wrapped. STEP is `before_` or `after_` one of claim, call, settle,
keep (a dead letter) and ack; COUNT says at which time that it comes by. STEP `never` runs on.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from postroom.chassis.runtime import run as run_program
from postroom.worker.config import load_consumer_config, worker_of
from postroom.worker.consumer import open_consumer

STEPS = ("claim", "call", "settle", "ack")
LETTER_STEPS = ("keep", "ack")


def dying(step: str, count: int, when: str, work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wrap one step, so that the process dies at the time number `count`."""
    left = [count]

    def die_at(moment: str) -> None:
        if when == f"{moment}_{step}":
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    async def wrapped(*arguments: Any, **named: Any) -> Any:
        die_at("before")
        result = await work(*arguments, **named)
        die_at("after")
        return result

    return wrapped


async def main(file: Path, when: str, count: int) -> None:
    config = load_consumer_config(file, {})
    async with open_consumer(config, worker_of(config)) as services:
        handler, inbox = services.consumer.handler, services.consumer.inbox
        inbox.claim = dying("claim", count, when, inbox.claim)  # type: ignore[method-assign]
        inbox.settle = dying("settle", count, when, inbox.settle)  # type: ignore[method-assign]
        handler._client.call = dying("call", count, when, handler._client.call)  # type: ignore[method-assign]
        letters: Any = services.consumer._dead_letters
        letters.keep = dying("keep", count, when, letters.keep)
        pull = services.consumer._pull
        pull.answer = dying("ack", count, when, pull.answer)  # type: ignore[method-assign]
        await services.consumer.run()


if __name__ == "__main__":
    run_program(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
