"""Reading the caller's iterable without holding up the event loop: an ordinary one may block, so a thread walks it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Sequence
from typing import Final, Generic, TypeVar

T = TypeVar("T")

MAX_AHEAD: Final = 1024  # items that the thread may be ahead


async def feed(items: Iterable[T] | AsyncIterable[T]) -> AsyncGenerator[T, None]:
    """Yield the items of any iterable; what the iterable raises is raised here."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    elif isinstance(items, Sequence):
        for item in items:
            yield item
    else:
        walk = _Walk(items)
        try:
            async for item in walk.items():
                yield item
        finally:
            walk.stop()


class _Walk(Generic[T]):
    """A daemon thread that walks `items`, at most `MAX_AHEAD` before its reader."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self._ahead: deque[T] = deque()
        self._room = threading.Semaphore(MAX_AHEAD)
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()
        self._stopped = False
        self._ended = False
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="postroom-feed", daemon=True).start()

    async def items(self) -> AsyncIterator[T]:
        """Yield what the thread finds, in order."""
        while True:
            await self._more.wait()
            self._more.clear()
            ended = self._ended  # read first: what was found before the end is still yielded
            while self._ahead:
                self._room.release()
                yield self._ahead.popleft()
            if ended:
                break
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Let the thread end at its next item."""
        self._stopped = True
        self._room.release()

    def _run(self) -> None:
        try:
            for item in self._items:
                self._room.acquire()
                if self._stopped:
                    return
                self._ahead.append(item)
                if len(self._ahead) == 1:
                    self._wake()
        except BaseException as error:  # noqa: BLE001 - raised again where the items are read
            self._error = error
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._more.set)
        except RuntimeError:
            self._stopped = True  # the loop is closed: nobody reads any more
