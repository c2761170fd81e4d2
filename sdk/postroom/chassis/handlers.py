"""Users' code in a process of ours: whatever it raises is an error, which neither ends the process nor keeps it."""

import asyncio
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, cast

from postroom._wire.retry import error_text

T = TypeVar("T")
_PLACES: Final = ("stdlib", "platstdlib", "purelib", "platlib")
_LAST_WORDS_SECONDS: Final = 1.0  # that an end waits for: nobody may be reading
_LIBRARIES: Final = (*map(sysconfig.get_path, _PLACES), str(Path(__file__).parents[1]))


class HandlerEnded(Exception):
    """A handler raised what would have ended its worker, or was cancelled by itself or by something that it awaited."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the handler ended with {error_text(error)}")


def located(error: BaseException) -> str:
    """Return what users' code raised, with its last line: that of a library only where it has none."""
    if isinstance(error, SyntaxError):
        return error_text(error)  # which names the line that it is about
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<")]
    last = ([each for each in frames if not each.filename.startswith(_LIBRARIES)] or frames)[-1]
    return f"{error_text(error)} ({last.filename}, line {last.lineno})"


def end_within(seconds: float, code: int) -> None:
    """End the process with `code` if it still runs `seconds` from now.

    Python waits for every thread, also for one of `asyncio.to_thread`, and a loop for every task, also for one that
    refuses to be cancelled. Neither can be ended.
    """

    def say() -> None:
        main = threading.main_thread()
        left = [each.name for each in threading.enumerate() if not each.daemon and each is not main]
        with suppress(OSError, ValueError):
            threads = ", ".join(left) or "none"
            sys.stderr.write(f"postroom: users' code does not end: the process ends without it (threads: {threads})\n")
            sys.stderr.flush()
            sys.stdout.flush()

    def end() -> None:
        time.sleep(seconds)
        saying = threading.Thread(target=say, daemon=True)
        saying.start()
        saying.join(_LAST_WORDS_SECONDS)
        os._exit(code)

    threading.Thread(target=end, name="end", daemon=True).start()


async def contained(work: Callable[[], Awaitable[T]]) -> T:
    """Call a handler and await it, in a task of its own, which it may cancel.

    Whatever would end its worker is an error like any other: raises `HandlerEnded`. It is not called where the caller
    is cancelled before that task begins.
    """
    try:
        return await asyncio.create_task(_raising_errors(work))
    except (Exception, asyncio.CancelledError) as error:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise asyncio.CancelledError from error  # its worker is being stopped, whatever the handler makes of that
        if isinstance(error, asyncio.CancelledError):
            raise HandlerEnded(error) from error
        raise


class _OneProcess(Awaitable[T]):
    """A handler that is awaited by the process that called it.

    One that it forks has the same event loop, stores and connections: where the handler leaves it, or awaits in it, it
    would be a second worker with those of the first. So it ends there.
    """

    def __init__(self, work: Awaitable[T]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, T]:
        process, steps = os.getpid(), self._work.__await__()
        step: Callable[[], Any] = partial(next, steps)
        while True:
            try:
                waits_for = step()
            except BaseException as ended:
                if os.getpid() != process:
                    _end_forked(ended)
                if isinstance(ended, StopIteration):
                    return cast("T", ended.value)
                raise
            if os.getpid() != process:
                _end_forked(None)
            try:
                step = partial(steps.send, (yield waits_for))
            except BaseException as thrown:  # noqa: BLE001 - whatever the loop throws is the handler's
                step = partial(steps.throw, thrown)


def _end_forked(ended: BaseException | None) -> NoReturn:
    """End a process that a handler forked, with the code of what it raised; None where it awaits something."""
    code = ended.code if isinstance(ended, SystemExit) else 1
    with suppress(OSError, ValueError):
        if ended is None or isinstance(ended, StopIteration):
            sys.stderr.write("postroom: a process that a handler forked ends here: end it yourself with os._exit()\n")
        elif not isinstance(ended, SystemExit):
            traceback.print_exception(ended)
        elif isinstance(code, str):
            sys.stderr.write(f"{code}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code & 0xFF if isinstance(code, int) else code is not None)


async def _raising_errors(work: Callable[[], Awaitable[T]]) -> T:
    try:
        return await _OneProcess(work())
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise HandlerEnded(error) from error  # a task that raises it would end the loop
