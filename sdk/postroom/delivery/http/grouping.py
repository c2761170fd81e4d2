"""Group commit: what many tasks want of a database at once becomes one statement.

A statement takes everything that arrived while the one before it ran, so that under load a thousand messages cost a few
statements, and a single message waits for nobody. Where a statement fails, each item is tried alone: one that the
database refuses takes no other along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

Run = Callable[[Sequence[Item]], Awaitable[Sequence[Result]]]


class Grouped(Generic[Item, Result]):
    """Calls `run` with at most `most` items at once, and never twice at the same time."""

    def __init__(self, run: Run[Item, Result], *, most: int) -> None:
        self._run = run
        self._most = most
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._runner: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Result:
        """Return what `run` made of `item`; raises what it raised."""
        done: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
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

    async def _run_group(self, group: Sequence[tuple[Item, asyncio.Future[Result]]]) -> None:
        try:
            results = await self._run([item for item, _ in group])
        except BaseException as error:
            if isinstance(error, Exception) and len(group) > 1:
                for each in group:
                    await self._run_group([each])
                return
            for _, done in group:
                _fail(done, error)
            if not isinstance(error, Exception):
                raise
            return
        for (_, done), result in zip(group, results, strict=True):
            if not done.done():  # nobody waits any more for one that was cancelled
                done.set_result(result)


def _fail(done: asyncio.Future[Result], error: BaseException) -> None:
    if done.done():
        return
    if isinstance(error, asyncio.CancelledError):
        done.cancel()
    else:
        done.set_exception(error)
