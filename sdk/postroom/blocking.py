"""`Client`: the same as `AsyncClient`, for programs without an event loop.

Not a copy: each method is `AsyncClient`'s own, with its signature and docstring. A request runs over blocking sockets
in the calling thread, where nothing in the method ever waits for a loop; a stream, which sends and receives at once,
on a loop in a thread of its own. A test checks that each method of `AsyncClient` is here.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar, cast

from postroom._wire.message import SendRequest
from postroom._wire.operations import ListQuery
from postroom._wire.retry import Patience
from postroom._wire.sends import BatchResult, OutboxRow
from postroom._wire.sockets import BlockingPool, run_to_end
from postroom._wire.transport import Exchanges
from postroom.client import AsyncClient

if TYPE_CHECKING:
    from postroom._wire.loop_thread import LoopThread

__all__ = ["Client"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _blocking(
    method: Callable[Concatenate[AsyncClient, _P], Coroutine[Any, Any, _R]],
) -> Callable[Concatenate[Client, _P], _R]:
    """Make the method that runs `method` to its end."""

    @functools.wraps(method)
    def call(self: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self._check_process()
        return cast(_R, run_to_end(getattr(self._requests, method.__name__)(*args, **kwargs)))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncClient, _P], AsyncIterator[_R]],
) -> Callable[Concatenate[Client, _P], Generator[_R, None, None]]:
    """Make the generator that yields the items of `method` from the client's own loop."""

    @functools.wraps(method)
    def iterate(self: Client, /, *args: _P.args, **kwargs: _P.kwargs) -> Generator[_R, None, None]:
        loop, client = self._streaming()
        yield from loop.walk(method(client, *args, **kwargs))

    return iterate


class Client:
    """A client of the daemon for programs without an event loop; see `AsyncClient`.

    May be used by many threads at once, as a context manager or with `close`. A process that was forked needs a client
    of its own: threads don't survive a fork, and connections must not be shared.
    """

    def __init__(self, socket: Path | str | None = None, *, timeout: float = 10.0, patience: float = 30.0) -> None:
        requests = _Requests(socket, timeout=timeout, patience=patience)
        self._use(requests, functools.partial(AsyncClient, socket, timeout=timeout, patience=patience))

    def _use(self, requests: AsyncClient, make_streamer: Callable[[], AsyncClient]) -> None:
        """Send requests through `requests`, whose methods never wait for a loop, and stream through another client."""
        self._requests = requests
        self._make_streamer = make_streamer
        self._streams: tuple[LoopThread, AsyncClient] | None = None  # once there is one
        self._lock = threading.RLock()
        self._process: int | None = os.getpid()  # the process that may use it

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection and end the thread; a second call, or one in a forked process, does nothing."""
        if self._process != os.getpid():
            return
        with self._lock:  # else a thread may be about to begin a stream
            self._process = None
        run_to_end(self._requests.close())
        if self._streams is not None:
            loop, streamer = self._streams
            loop.run(streamer.close)
            loop.close()

    send = _blocking(AsyncClient.send)
    send_cloudevent = _blocking(AsyncClient.send_cloudevent)
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
    export_in_chunks = _iterating(AsyncClient.export_in_chunks)
    inspect = _blocking(AsyncClient.inspect)
    log = _blocking(AsyncClient.log)
    trace = _blocking(AsyncClient.trace)
    act = _blocking(AsyncClient.act)
    bulk = _blocking(AsyncClient.bulk)
    prune = _blocking(AsyncClient.prune)
    resend_missing = _blocking(AsyncClient.resend_missing)
    backup = _iterating(AsyncClient.backup)
    pause_relay = _blocking(AsyncClient.pause_relay)
    resume_relay = _blocking(AsyncClient.resume_relay)
    topics = _blocking(AsyncClient.topics)
    subscribe = _blocking(AsyncClient.subscribe)
    unsubscribe = _blocking(AsyncClient.unsubscribe)

    def send_many(
        self, messages: Iterable[SendRequest] | AsyncIterable[SendRequest], *, traceparent: str | None = None
    ) -> Iterator[BatchResult]:
        """Do as `AsyncClient.send_many` does; `messages` is read in a thread of its own."""
        for results in self.send_many_in_chunks(messages, traceparent=traceparent):
            yield from results

    def export(self, query: ListQuery | None = None) -> Iterator[OutboxRow]:
        """Do as `AsyncClient.export` does."""
        for rows in self.export_in_chunks(query):
            yield from rows

    def _streaming(self) -> tuple[LoopThread, AsyncClient]:
        with self._lock:
            self._check_process()
            if self._streams is None:
                from postroom._wire.loop_thread import LoopThread  # noqa: PLC0415 - brings asyncio

                self._streams = LoopThread(), self._make_streamer()
            return self._streams

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("this client is closed, or was opened before a fork: create one in this process")


class _Requests(AsyncClient):
    """An `AsyncClient` over blocking sockets: what its methods await is done when they get it."""

    def _pool(self, path: str) -> Exchanges:
        return BlockingPool(path)

    def _patience(self) -> Patience:
        return Patience(self._patience_seconds, sleep=_sleep)


async def _sleep(seconds: float) -> None:
    time.sleep(seconds)  # noqa: ASYNC251 - there is no loop
