"""A thread with an event loop of its own, for what blocking code needs one for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

_CANCEL_SECONDS: Final = 10.0  # for what is interrupted to wind up

T = TypeVar("T")


class LoopThread:
    """The loop runs until `close`; after a fork it does not."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postroom-client", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end on the loop."""
        if not self.alive:
            work.close()
            raise RuntimeError("this client is closed")
        ended = threading.Event()

        async def watched() -> T:
            task = asyncio.ensure_future(work)
            task.add_done_callback(lambda _: ended.set())
            return await task

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        try:
            return future.result()
        except BaseException:
            if future.cancel():  # interrupted, as by Ctrl-C: wait until the work has really ended
                ended.wait(_CANCEL_SECONDS)
            raise

    def close(self) -> None:
        """End the loop and its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
