"""`Client`: the same as `AsyncClient`, for programs without an event loop.

Not a twin: each method is `AsyncClient`'s own, run on a loop in a thread of its own, with its signature and docstring.
A test goes through `AsyncClient` and finds each of its methods here.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from postroom._wire.message import SendRequest
from postroom._wire.sends import BatchResult
from postroom.client import AsyncClient

__all__ = ["Client"]

_CANCEL_SECONDS: Final = 10.0  # for what is interrupted to wind up

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _blocking(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _R]],
) -> Callable[Concatenate[Client, _P], _R]:
    """Make the method that runs `method` to its end on the client's own loop."""

    @functools.wraps(method)
    def call(self: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return self._run(method(self._client, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, _P], AsyncIterator[_R]],
) -> Callable[Concatenate[Client, _P], Iterator[_R]]:
    """Make the generator that takes each item of `method`'s from the client's own loop."""

    @functools.wraps(method)
    def iterate(self: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_R]:
        items = method(self._client, *args, **kwargs)
        try:
            while True:
                try:
                    yield self._run(_next(items))
                except StopAsyncIteration:
                    return
        finally:
            if isinstance(items, AsyncGenerator) and self._thread.is_alive():
                self._run(_close(items))

    return iterate


async def _next(items: AsyncIterator[_R]) -> _R:
    return await anext(items)


async def _close(items: AsyncGenerator[Any, None]) -> None:
    await items.aclose()


class Client:
    """A client of the daemon for programs without an event loop; see `AsyncClient`.

    May be used by many threads at once, as a context manager or with `close`. A process that was forked needs a client
    of its own: threads don't survive a fork, and connections must not be shared.
    """

    def __init__(self, socket: Path | str | None = None, *, timeout: float = 10.0, patience: float = 30.0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="postroom-client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_open(socket, timeout, patience))
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection and end the thread; a second call, or one in a forked process, does nothing."""
        if not self._thread.is_alive():
            return
        self._run(self._client.close())
        self._stop()

    send = _blocking(AsyncClient.send)
    send_many_in_chunks = _iterating(AsyncClient.send_many_in_chunks)
    get = _blocking(AsyncClient.get)
    wait = _blocking(AsyncClient.wait)
    wait_many = _blocking(AsyncClient.wait_many)
    inbox = _blocking(AsyncClient.inbox)
    events = _iterating(AsyncClient.events)
    health = _blocking(AsyncClient.health)
    ready = _blocking(AsyncClient.ready)
    version = _blocking(AsyncClient.version)
    list_rows = _blocking(AsyncClient.list_rows)
    export = _iterating(AsyncClient.export)
    inspect = _blocking(AsyncClient.inspect)
    act = _blocking(AsyncClient.act)
    bulk = _blocking(AsyncClient.bulk)
    prune = _blocking(AsyncClient.prune)
    resend_missing = _blocking(AsyncClient.resend_missing)
    pause_relay = _blocking(AsyncClient.pause_relay)
    resume_relay = _blocking(AsyncClient.resume_relay)
    topics = _blocking(AsyncClient.topics)
    subscribe = _blocking(AsyncClient.subscribe)
    unsubscribe = _blocking(AsyncClient.unsubscribe)

    def send_many(self, messages: Iterable[SendRequest] | AsyncIterable[SendRequest]) -> Iterator[BatchResult]:
        """Do as `AsyncClient.send_many` does; `messages` is read in a thread of its own."""
        for results in self.send_many_in_chunks(messages):
            yield from results

    def _run(self, work: Coroutine[Any, Any, _R]) -> _R:
        if not self._thread.is_alive():  # also after a fork: nobody would ever run it
            work.close()
            raise RuntimeError("this client is closed, or was opened before a fork: create one in this process")
        ended = threading.Event()

        async def watched() -> _R:
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

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _open(socket: Path | str | None, timeout: float, patience: float) -> AsyncClient:  # noqa: ASYNC109
    return AsyncClient(socket, timeout=timeout, patience=patience)
