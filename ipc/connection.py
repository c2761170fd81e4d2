"""A connection: its peer, its deadlines, the errors that HTTP itself makes, and the short way of a plain send.

Beside the deadlines that the broker's connections have as well, a socket open to every local process needs: the peer's
credentials, read once on accept; deadlines for a body that does not come to an end; an answer after a half-close; and
problem+json where the parser refuses a request (bad-input.md, "Before HTTP" and "HTTP").

To read a request with aiohttp and to build its objects costs more than the rest of a send but its commit. So a
connection looks at what arrives. A `POST /v1/send` that comes alone and whole, over the Unix socket, with nothing in
its head but what senders usually say, becomes a `PlainSend`, is answered as every request is, and the answer is written
here; aiohttp sees nothing of it. Everything else is given to aiohttp, which reads it, refuses it or waits for the rest
of it. Both are answered by `Server`, so that access, shares, limits, counters and errors are the same.

The two may never disagree about where a request begins. What is given to aiohttp as one whole request, in a form that
nobody can read another way, leaves it where a request ends, and the next one may take the short way again. After
anything else the connection stays with aiohttp.
"""

import asyncio
import re
import select
import socket
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, Final, NamedTuple, cast

from aiohttp import web
from aiohttp.http import StreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestPayloadError
from multidict import CIMultiDict

from ipc.http import SEND, Answer, PlainSend, problem_answer
from ipc.peers import peer_of
from ipc.shares import Budget, Turns
from outbox import Caller
from postroom.chassis.listener import NEVER, Deadlines, TimedConnection, has_passed
from postroom.errors import Problem

_MAX_HEAD: Final = 4096  # bytes
_HEAD: Final = re.compile(
    rb"(?:GET|POST|DELETE) [\x21-\x7e]+ HTTP/1\.1\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e]*\r\n)*\r\n"
)
_LENGTH: Final = re.compile("0|[1-9][0-9]{0,8}")
_SEND_LINE: Final = f"POST {SEND} HTTP/1.1"
_UNCLEAR: Final = frozenset({"transfer-encoding", "upgrade", "expect"})  # where they end, or what comes next
_USUAL: Final = frozenset(
    {
        *("content-type", "content-length", "idempotency-key", "traceparent"),
        *("host", "user-agent", "accept", "accept-encoding", "connection"),  # which change nothing
    }
)


class Arrived(NamedTuple):
    """A request: its first line, its fields by their names in lower case, each given once, and its body."""

    line: str
    fields: dict[str, str]
    body: bytes


def read(data: bytes) -> Arrived | None:
    """Return the request that `data` is; None where it is not exactly one, or could be read another way."""
    head = _HEAD.match(data, 0, _MAX_HEAD)
    if head is None:
        return None
    line, *lines = head[0].decode("ascii").split("\r\n")[:-2]
    fields = {}
    for each in lines:
        name, _, value = each.partition(":")
        fields[name.lower()] = value.strip("\t ")
    length = fields.get("content-length", "0")
    if (
        len(fields) < len(lines)
        or "host" not in fields
        or not _UNCLEAR.isdisjoint(fields)
        or fields.get("connection", "keep-alive").lower() != "keep-alive"
        or not _LENGTH.fullmatch(length)
        or len(data) != head.end() + int(length)
    ):
        return None
    return Arrived(line, fields, data[head.end() :])


class Connection(TimedConnection):
    """A caller's connection."""

    __slots__ = (
        "_answer",
        "_body_since",
        "_closing",
        "_end",
        "_half_closed",
        "_idle_timer",
        "_last_body",
        "_now",
        "_sending",
        "_stays",
        "_unread",
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
        self._answer: Callable[[PlainSend], Awaitable[Answer]] = cast(Any, server.request_handler)
        self._sending: asyncio.Task[None] | None = None  # answers a plain send
        self._unread = b""  # what arrived behind that
        self._stays = False  # with aiohttp, which alone knows where the next request begins
        self._closing = False
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read the peer's credentials, or hang up when it is already gone or one connection too many."""
        sock = transport.get_extra_info("socket")
        try:
            self.caller = peer_of(sock)
        except OSError:
            cast(asyncio.Transport, transport).abort()
        self.is_tcp = sock.family != socket.AF_UNIX
        super().connection_made(transport)

    @property
    def busy(self) -> bool:
        """Whether a request is being answered or waits for its turn."""
        return self._sending is not None or super().busy

    def data_received(self, data: bytes) -> None:
        """Answer a plain send, and give everything else to aiohttp."""
        if self._sending is not None:
            self._unread += data
            if self.transport is not None:
                self.transport.pause_reading()
            return
        arrived = None if self._stays or self.is_tcp else read(data)
        if (
            arrived is not None
            and arrived.line == _SEND_LINE
            and arrived.fields.keys() <= _USUAL
            and len(arrived.fields) <= self.max_headers
            and not self.busy
        ):
            self._heard_at = self._now()
            self.keep_alive(False)  # aiohttp's timer, which sees nothing of this
            send = PlainSend(self, CIMultiDict(arrived.fields), arrived.body)
            self._sending = self._loop.create_task(self._send(send))
            return
        self._stays = arrived is None
        self._stop_timer()
        super().data_received(data)

    async def _send(self, send: PlainSend) -> None:
        """Answer a send, and go on with what came behind it."""
        try:
            answer = await self._answer(send)
            if self.transport is not None:
                self.transport.write(answer.encode())
                if self.writing_paused:
                    await StreamWriter(self, self._loop).drain()
            ends = answer.keep_alive is False or self._closing
        except ConnectionError:
            ends = True
        self._sending = None
        if self.transport is None:
            return
        if ends:
            self.transport.close()
            return
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(self.keepalive_timeout, self._close_where_idle)
        if self._unread:
            unread, self._unread = self._unread, b""
            self._stays = True
            self.transport.resume_reading()
            self.data_received(unread)

    def _close_where_idle(self) -> None:
        """Close the connection where nothing has come for long, else look again when that may be."""
        left = self.keepalive_timeout - (0 if self.busy else self._now() - self._heard_at)
        if left > 0:
            self._idle_timer = self._loop.call_later(left, self._close_where_idle)
        else:
            self.force_close()

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _notice(self, message: object, body: StreamReader) -> None:
        """Remember the newest request's body; where the parser gave up within one, tell whoever reads it."""
        if not isinstance(message, RawRequestMessage) and self._last_body is not None and not self._last_body.is_eof():
            self._last_body.set_exception(RequestPayloadError("it does not match its headers"))
        self._last_body = body

    def eof_received(self) -> bool:  # type: ignore[override] # asyncio's contract: True keeps the other half open
        """Answer what has been asked in full before closing; nothing more will come."""
        has_arrived = self.busy and self._last_body is not None and self._last_body.is_eof()
        complete = self._sending is not None or has_arrived
        if complete:
            self._half_closed = True
            self.close()
        return complete

    def connection_lost(self, exc: BaseException | None) -> None:
        """Let whoever waits on the caller's behalf go."""
        self._stop_timer()
        super().connection_lost(exc)
        self.end_waiting()

    def close(self) -> None:
        """Close once the request in hand is answered."""
        self._closing = True
        super().close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:  # noqa: ASYNC109 - aiohttp's signature
        """Let the send in hand finish for at most `timeout` seconds, and close."""
        if self._sending is not None:
            await asyncio.wait({self._sending}, timeout=timeout)
        await super().shutdown(timeout)
        if self._sending is not None:
            self._sending.cancel()

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
