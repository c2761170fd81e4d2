"""A connection: its peer, its deadlines and the errors that HTTP itself makes.

Beside the deadlines that the broker's connections have as well, a socket open to every local process needs: the peer's
credentials, read once on accept; deadlines for a body that does not come to an end; an answer after a half-close; and
problem+json where the parser refuses a request (bad-input.md, "Before HTTP" and "HTTP").
"""

import asyncio
import select
import socket
from collections.abc import Iterator
from typing import Any, cast

from aiohttp import web
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestPayloadError

from ipc.answers import problem_answer
from ipc.peers import peer_of
from ipc.shares import Budget, Turns
from outbox import Caller
from postroom.chassis.listener import NEVER, Deadlines, TimedConnection, has_passed
from postroom.errors import Problem


class Connection(TimedConnection):
    """A caller's connection."""

    __slots__ = (
        "_body_since",
        "_end",
        "_half_closed",
        "_last_body",
        "_now",
        "between_lines",
        "caller",
        "is_allowed",
        "is_tcp",
        "requests",
        "turns",
    )

    requests: Budget  # what all connections share; the server sets it
    turns: Turns
    is_allowed: bool  # to call: so does the server

    def __init__(self, server: web.Server, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(server, loop=loop, **options)
        self.caller = Caller(-1, -1)
        self.is_tcp = False
        self.between_lines = False  # a batch with no line begun: the next may take its time, as long as bytes come
        self._last_body: StreamReader | None = None
        self._end: asyncio.Future[None] = loop.create_future()
        self._half_closed = False
        self._body_since = NEVER
        self._now = loop.time

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read the peer's credentials, or hang up when it is already gone or one connection too many."""
        sock = transport.get_extra_info("socket")
        try:
            self.caller = peer_of(sock)
        except OSError:
            cast(asyncio.Transport, transport).abort()
        self.is_tcp = sock.family != socket.AF_UNIX
        super().connection_made(transport)

    def _notice(self, message: object, body: StreamReader) -> None:
        """Remember the newest request's body; where the parser gave up within one, tell whoever reads it."""
        if not isinstance(message, RawRequestMessage) and self._last_body is not None and not self._last_body.is_eof():
            self._last_body.set_exception(RequestPayloadError("it does not match its headers"))
        self._last_body = body

    def eof_received(self) -> bool:  # type: ignore[override] # asyncio's contract: True keeps the other half open
        """Answer what has been asked in full before closing; nothing more will come."""
        complete = self.busy and self._last_body is not None and self._last_body.is_eof()
        if complete:
            self._half_closed = True
            self.close()
        return complete

    def connection_lost(self, exc: BaseException | None) -> None:
        """Let whoever waits on the caller's behalf go."""
        super().connection_lost(exc)
        self.end_waiting()

    def until_end(self) -> asyncio.Future[None]:
        """Return a future that is done once the caller has disconnected or the server stops; for long answers."""
        return self._end

    def end_waiting(self) -> None:
        """End what waits for `until_end`, now and from here on."""
        if not self._end.done():
            self._end.set_result(None)

    def begin(self) -> None:
        """Note that a body begins which has not arrived in full, or a line of a batch."""
        self._body_since = self._now()

    def _deadlines(self, now: float, limits: Deadlines) -> Iterator[tuple[str, bool]]:
        yield "caller_gone", self._half_closed and self._has_hung_up()
        yield from super()._deadlines(now, limits)
        request = self.current_request
        if request is not None and not request.content.is_eof() and self._body_since != NEVER:
            yield "body_stalled", has_passed(self._heard_at, now, limits.stall_seconds)
            yield "body_too_slow", not self.between_lines and has_passed(self._body_since, now, limits.body_seconds)

    def _has_hung_up(self) -> bool:
        """Tell a caller that has closed its socket from one that only has nothing more to say."""
        if self.transport is None:
            return False
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), 0)
        return any(events & select.POLLHUP for _, events in poller.poll(0))

    def _last_answer(self, problem: Problem) -> web.StreamResponse:
        return problem_answer(problem, close=True)
