"""Bad peers of an HTTP server: deadlines for a head and a reader that do not come to an end, answers to bad heads.

aiohttp bounds how long a connection idles, before a request and between two, and nothing else. `TimedConnection`
remembers since when its peer owes something, and `TimedServer.sweep` drops whoever is overdue (bad-input.md,
"Before HTTP").
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, ClassVar, Final, Protocol, cast

import structlog
from aiohttp import web
from aiohttp.http_exceptions import (
    BadHttpMethod,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
    PayloadEncodingError,
)
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from postroom.chassis.routes import BROKEN_BODY, INTERNAL_ERROR, problem_response
from postroom.errors import PostroomError, Problem

_log = structlog.get_logger(__name__)


SWEEP_SECONDS: Final = 1.0
_SWEPT_AT_ONCE: Final = 100  # connections
_NOT_HTTP: Final = "the request is not HTTP/1.1"
_REFUSED: Final[dict[type[BaseException], str]] = {
    LineTooLong: "a line of the request's head is too long",
    BadHttpMethod: "the request's method is not one",
    InvalidURLError: "the request's target is not one",
    InvalidHeader: "a header field of the request is not well formed",
    PayloadEncodingError: str(BROKEN_BODY.detail),
}
NEVER: Final = 0.0  # "no such moment yet"; the loop's clock never reads zero here


class Deadlines(Protocol):
    """How slow a peer may be, in seconds; a config holds them under these names."""

    @property
    def header_seconds(self) -> float:
        """Time for the head of a request, from its first byte."""

    @property
    def body_seconds(self) -> float:
        """Time for the body of a request."""

    @property
    def stall_seconds(self) -> float:
        """Time without an answer being read."""

    @property
    def idle_seconds(self) -> float:
        """Time that a connection may idle; aiohttp itself sees to it."""


class TimedConnection(RequestHandler):
    """A peer's connection; `overdue` tells the server's sweep when to drop it."""

    __slots__ = ("_blocked_since", "_head_since", "_heard_at")

    def __init__(self, server: web.Server, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(server, loop=loop, **options)
        self._head_since = NEVER
        self._heard_at = NEVER
        self._blocked_since = NEVER

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember since when the peer may ask."""
        self._heard_at = self._loop.time()
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Parse, and remember since when a head is incomplete."""
        requests = self._request_count
        super().data_received(data)
        self._heard_at = self._loop.time()
        if self._request_count != requests:
            self._head_since = NEVER
            self._notice(*self._messages[-1])
        elif not self.busy and self._head_since == NEVER:
            self._head_since = self._heard_at

    def _notice(self, message: object, body: StreamReader) -> None:
        """Take note of the newest request: its head, or what the parser says against it, and its body."""

    def pause_writing(self) -> None:
        """Remember since when the peer has not read its answers."""
        super().pause_writing()
        self._blocked_since = self._loop.time()

    def resume_writing(self) -> None:
        """Forget it: the peer reads again."""
        super().resume_writing()
        self._blocked_since = NEVER

    @property
    def busy(self) -> bool:
        """Whether a request is being answered or waits for its turn."""
        return self._waiter is None or self._waiter.done()

    @property
    def idle_since(self) -> float | None:
        """Since when (loop time) nothing has been going on here; None while something is."""
        return None if self.busy else self._heard_at

    def overdue(self, now: float, limits: Deadlines) -> str | None:
        """Say which deadline has passed, or nothing."""
        return next((reason for reason, passed in self._deadlines(now, limits) if passed), None)

    def _deadlines(self, now: float, limits: Deadlines) -> Iterator[tuple[str, bool]]:
        yield "reply_not_read", has_passed(self._blocked_since, now, limits.stall_seconds)
        yield "head_too_slow", has_passed(self._head_since, now, limits.header_seconds)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what the parser refused, or what escaped a handler, as a problem, and close.

        What the parser says quotes what it read: neither an answer nor a log repeats it, since it may hold a token.
        """
        del message
        if isinstance(exc, ConnectionError):
            raise exc  # the peer has gone
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is already under way")
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            sentence = next((text for kind, text in _REFUSED.items() if isinstance(exc, kind)), _NOT_HTTP)
            return self._last_answer(PostroomError.of(status, "bad_request", sentence).problem)
        _log.error("unforeseen_error", exc_info=exc)
        return self._last_answer(INTERNAL_ERROR)

    def _last_answer(self, problem: Problem) -> web.StreamResponse:
        """Return the answer that says `problem`, and closes."""
        answer = problem_response(problem)
        answer.force_close()
        return answer

    def abort(self) -> None:
        """Drop the connection without waiting for anything to be read."""
        if self.transport is not None:
            self.transport.abort()


class TimedServer(web.Server):
    """An aiohttp server that drops the connections of peers that are too slow, for as long as `sweep` runs."""

    connection_type: ClassVar[type[TimedConnection]] = TimedConnection

    def __init__(self, handler: Any, *, deadlines: Deadlines, on_drop: Callable[[str], None], **options: Any) -> None:
        super().__init__(handler, keepalive_timeout=deadlines.idle_seconds, **options)
        self._deadlines = deadlines
        self._on_drop = on_drop
        self._running_loop = asyncio.get_running_loop()

    def __call__(self) -> RequestHandler:
        """Make the protocol of a new connection (aiohttp and asyncio call this)."""
        return self.connection_type(self, loop=self._running_loop, **self._kwargs)

    async def sweep(self) -> None:
        """Drop connections whose deadline has passed, once a second, for ever; few at a time."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            now = self._running_loop.time()
            connections = cast("list[TimedConnection]", self.connections)
            for start in range(0, len(connections), _SWEPT_AT_ONCE):
                self._drop(connections[start : start + _SWEPT_AT_ONCE], now)
                await asyncio.sleep(0)

    def drop_overdue(self, now: float) -> None:
        """Drop every connection whose deadline has passed at `now` (loop time), and tell `on_drop` why."""
        self._drop(cast("list[TimedConnection]", self.connections), now)

    def _drop(self, connections: Sequence[TimedConnection], now: float) -> None:
        for connection in connections:
            if (reason := connection.overdue(now, self._deadlines)) is not None:
                self._on_drop(reason)
                connection.abort()


def has_passed(since: float, now: float, seconds: float) -> bool:
    """Say whether more than `seconds` lie between `since` and `now`; never where `since` is `NEVER`."""
    return since != NEVER and now - since > seconds
