"""Many requests of one kind in few statements: those that come while one statement runs share the next."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Grouped(Generic[Item, Answer]):
    """Calls `run` with at most `most` items at once, and never twice at a time.

    Where a group fails each item is run by itself, so that a faulty one fails alone; unless they fail `together`, since
    no item can be at fault.
    """

    def __init__(
        self, run: Callable[[Sequence[Item]], Awaitable[Sequence[Answer]]], most: int, *, together: bool = False
    ) -> None:
        self._run = run
        self._most = most
        self._together = together
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._runner: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Answer:
        """Return what `run` made of `item`; raises what it raised."""
        done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, done))
        if self._runner is None:
            self._runner = asyncio.create_task(self._drain())
        return await done

    async def _drain(self) -> None:
        try:
            while self._waiting:
                group, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                await self._run_group(group)
        finally:
            self._runner = None

    async def _run_group(self, group: Sequence[tuple[Item, asyncio.Future[Answer]]]) -> None:
        try:
            results = await self._run([item for item, _ in group])
        except BaseException as error:
            if isinstance(error, Exception) and len(group) > 1 and not self._together:
                for each in group:
                    await self._run_group([each])
                return
            for _, done in group:
                if isinstance(error, asyncio.CancelledError):
                    done.cancel()
                elif not done.done():
                    done.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, done), result in zip(group, results, strict=True):
            if not done.done():  # it was cancelled
                done.set_result(result)
