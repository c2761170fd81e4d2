"""A thread with an event loop of its own, for blocking code that needs one.

Ctrl-C may come between any two instructions of the thread that waits. So that thread holds no lock that the loop needs,
and what it leaves running is ended on the loop when the iteration is closed.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Final, TypeVar

T = TypeVar("T")

_CLOSED: Final = "this client is closed"


class LoopThread:
    """The loop runs until `close`; after a fork it does not."""

    def __init__(self) -> None:
        self._process: int | None = os.getpid()  # where it runs; `Thread.is_alive` is wrong once interrupted
        self._waiting = set[SimpleQueue[asyncio.Task[Any] | None]]()  # of those that wait for the end of work
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="postroom-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Run the loop until it is stopped, which SystemExit of a caller's code does not do: its task passes it on."""
        while True:
            with suppress(BaseException):
                self._loop.run_forever()
                break
            if self._process is None:
                self._loop.call_soon(self._loop.stop)  # that of `close` may have been in the same turn
        with suppress(BaseException):
            self._loop.run_until_complete(_end_all())

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work` to its end on the loop, where it goes on if this is interrupted.

        Raises `RuntimeError` where the loop is closed, also meanwhile.
        """
        if self._process != os.getpid():
            raise RuntimeError(_CLOSED)
        running: list[asyncio.Task[T]] = []
        ended = SimpleQueue[asyncio.Task[T] | None]()

        def end(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # asked for here, since an interrupted caller does not
            ended.put(task)

        def begin() -> None:
            running.append(self._loop.create_task(work()))
            running[0].add_done_callback(end)

        self._waiting.add(ended)
        try:
            self._loop.call_soon_threadsafe(begin)
            task = ended.get()
        finally:
            self._waiting.discard(ended)
        if task is None or (task.cancelled() and self._process is None):
            raise RuntimeError(_CLOSED)
        return task.result()

    def walk(self, items: AsyncIterator[T]) -> Generator[T, None, None]:
        """Yield the items, each taken on the loop; once this is closed, none of their code still runs."""
        taking: asyncio.Task[Any] | None = None

        async def take() -> T:
            nonlocal taking
            taking = asyncio.current_task()
            return await anext(items)

        async def end() -> None:
            if taking is not None:
                taking.cancel()
                await asyncio.gather(taking, return_exceptions=True)
            if isinstance(items, AsyncGenerator):
                await items.aclose()

        try:
            while True:
                try:
                    item = self.run(take)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if self._process == os.getpid():
                self.run(end)

    def close(self) -> None:
        """End the loop and its thread, and before them what a second Ctrl-C kept from ending."""
        self._process = None
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()  # from here on nothing can be given to it
        for ended in list(self._waiting):
            ended.put(None)


async def _end_all() -> None:
    """End what was begun, and what was yet to begin."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
