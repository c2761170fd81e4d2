"""Start and stop of a process: named tasks, signals, and the first task that ends too early ends the process.

Every program's main reads the same way: options → build → `run_until_stopped` → close what was built.
"""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

import structlog
import uvloop

from postroom.chassis.exits import Exit, Fatal

T = TypeVar("T")
_GC_THRESHOLDS: Final = (50_000, 20, 100)  # a batch's many small objects are dropped with it, and hold no circles

_log = structlog.get_logger(__name__)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program's main coroutine, on the faster event loop, and return what it returns."""
    gc.set_threshold(*_GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set `stop` on SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def run_until_stopped(
    tasks: Mapping[str, Coroutine[Any, Any, None]],
    stop: asyncio.Event,
    wind_down: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Run the named `tasks` until `stop` is set or one of them ends; cancel the rest and wait for them.

    `wind_down` runs before that, while the tasks still do: what has begun can come to its end.

    A task that ends before `stop` raises `Fatal` (its own, or exit code 1), since the process would limp without it.
    """
    running = {asyncio.create_task(task, name=name) for name, task in tasks.items()}
    stopping = asyncio.create_task(_until(stop), name="stop")
    done, _ = await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if wind_down is not None:
        await wind_down()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, stopping, return_exceptions=True)
    for task in done - {stopping}:
        raise _fatal(task)


async def _until(stop: asyncio.Event) -> None:
    await stop.wait()


def _fatal(task: asyncio.Task[Any]) -> Fatal:
    error = task.exception() if not task.cancelled() else None
    if isinstance(error, Fatal):
        return error
    _log.error("task_ended", task=task.get_name(), exc_info=error)
    return Fatal(Exit.FAILED, f"the task {task.get_name()!r} ended: {error!r}" if error else task.get_name())
