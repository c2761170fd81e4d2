"""A connection: its peer, its deadlines, the requests that it reads and the answers that it writes.

In addition to the deadlines of the broker's connections, a socket open to every local process needs the peer's
credentials, and deadlines for a body that does not end (docs/contract/bad-input.md, "Before HTTP").

Reading a request with aiohttp costs more than the rest of a send except its commit. So a `POST /v1/send` that comes
alone and whole, over the Unix socket, with only the usual fields in its head, becomes a `PlainSend`, whose answer is
written here without aiohttp. Everything else is given to aiohttp, and becomes a `Request`. Both are answered by
`Server`, so that access, shares, limits, counters and errors are the same.

The two must never disagree about where a request begins. A whole request in an unambiguous form leaves aiohttp at the
end of a request, and the next one may take the short way again. After anything else the connection stays with aiohttp.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final, NamedTuple, NoReturn, TypeVar, cast

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10, HttpVersion11, StreamWriter
from multidict import CIMultiDict

from ipc.peers import peer_of
from ipc.shares import Budget, Limits, Turns
from outbox import Caller
from postroom._wire.message import MAX_VALUES, refuse_duplicate_keys, refuse_too_many_values
from postroom._wire.transport import JSON
from postroom._wire.words import json_fault, shape_fault
from postroom.chassis.listener import NEVER, Deadlines, TimedConnection, has_passed
from postroom.chassis.routes import SERVER, is_media, problem_headers
from postroom.errors import PROBLEM_JSON, InvalidMessage, PostroomError, Problem

T = TypeVar("T", bound=msgspec.Struct)
SEND: Final = "/v1/send"
BATCH: Final = f"{SEND}/batch"
_MAX_HEAD: Final = 4096  # bytes
_HEAD: Final = re.compile(
    rb"(?:GET|POST|DELETE) [\x21-\x7e]+ HTTP/1\.1\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t\x20-\x7e]*\r\n)*\r\n"
)
_LENGTH: Final = re.compile("0|[1-9][0-9]{0,8}")
_SEND_LINE: Final = f"POST {SEND} HTTP/1.1"
_UNCLEAR: Final = frozenset({"transfer-encoding", "upgrade", "expect"})  # with them the request's end is not plain
_USUAL: Final = frozenset(
    {
        *("content-type", "content-length", "idempotency-key", "traceparent"),
        *("host", "user-agent", "accept", "accept-encoding", "connection"),  # without an effect here
    }
)
_START: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}

_encode: Final = msgspec.json.Encoder().encode


class RequestBase:
    """What every request has: the connection that it came over, and its part of the shared resources."""

    connection: Connection
    keeps_others_out = False  # whether it counts towards the limit of requests at once

    @property
    def caller(self) -> Caller:
        """The sender: the peer of the connection."""
        return self.connection.caller

    async def take_turn(self, count: int) -> None:
        """Return when `count` bytes may be processed for this caller, in turn with others."""
        await self.connection.turns.take(self.caller.uid, count)

    def only_waits(self) -> None:
        """Note that the request only waits from now on, and no longer counts towards the limit."""
        if self.keeps_others_out:
            self.keeps_others_out = False
            self.connection.requests.give_back(1, self.caller.uid)


class Request(RequestBase, web.BaseRequest):
    """A request that aiohttp has read; `params` are the variable parts of its path."""

    params: dict[str, str] = {}  # noqa: RUF012 - replaced, never changed: most paths have no variable part
    check_again: Callable[[], None] = staticmethod(lambda: None)  # raises where the caller may not go on with a stream

    @property
    def connection(self) -> Connection:  # type: ignore[override] # never set
        """The connection that the request came over."""
        return self._protocol  # type: ignore[return-value] # every protocol of the server is one

    @property
    def has_arrived(self) -> bool:
        """Whether all of its body has arrived."""
        return self.content.is_eof()


class PlainSend(RequestBase):
    """A `POST /v1/send` that arrived whole, with only the usual fields, read without aiohttp."""

    method: Final = hdrs.METH_POST
    path: Final = SEND
    has_arrived: Final = True

    def __init__(self, connection: Connection, headers: CIMultiDict[str], body: bytes) -> None:
        self.connection = connection
        self.headers = headers
        self.body = body


class Arrived(NamedTuple):
    """A request: its first line, its fields by their names in lower case, each given once, and its body."""

    line: str
    fields: dict[str, str]
    body: bytes


def read(data: bytes) -> Arrived | None:
    """Read `data` as a request; None where it is not exactly one, or is ambiguous."""
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
        *("_answer", "_body_since", "_closing", "_end", "_idle_timer", "_now", "_sending", "_stays", "_unread"),
        *("_with_aiohttp", "between_lines", "caller", "is_allowed", "is_tcp", "requests", "turns"),
    )

    requests: Budget  # shared by all connections; the server sets it
    turns: Turns
    is_allowed: bool  # to call; the server sets it

    def __init__(self, server: web.Server, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(server, loop=loop, **options)
        self.caller = Caller(-1, -1)
        self.is_tcp = False
        self.between_lines = False  # a batch with no line begun: the next may take its time, as long as bytes come
        self._end: asyncio.Future[None] = loop.create_future()
        self._body_since = NEVER
        self._now = loop.time
        self._answer: Callable[[PlainSend], Awaitable[Answer]] = cast(Any, server.request_handler)
        self._sending: asyncio.Task[None] | None = None  # answers a plain send
        self._unread = b""  # what arrived after that
        self._with_aiohttp = True  # whether aiohttp has the latest request; it has every connection first
        self._stays = False  # with aiohttp, which alone knows where the next request begins
        self._closing = False
        self._idle_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Read the peer's credentials, or drop the connection where it has already disconnected."""
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
        return self._sending is not None or (self._with_aiohttp and super().busy)

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
            self.keep_alive(False)  # aiohttp's timer, which does not know of this request
            send = PlainSend(self, CIMultiDict(arrived.fields), arrived.body)
            self._with_aiohttp = False
            self._sending = self._loop.create_task(self._send(send))
            return
        self._with_aiohttp = True
        self._stays = arrived is None
        self._stop_timer()
        super().data_received(data)

    def eof_received(self) -> bool:  # type: ignore[override] # as in the base
        """End a batch that is cut off with what came of it: each line is answered, one that is cut is not JSON."""
        if self._last_target == BATCH and self._last_body is not None and not self._last_body.is_eof():
            self._last_body.feed_eof()
        return super().eof_received()

    async def _send(self, send: PlainSend) -> None:
        """Answer a send, and go on with what came after it."""
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
        """Close the connection where nothing has come for long, else check again when that may be."""
        left = self.keepalive_timeout - (0 if self.busy else self._now() - self._heard_at)
        if left > 0:
            self._idle_timer = self._loop.call_later(left, self._close_where_idle)
        else:
            self.force_close()

    def _stop_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _has_asked(self) -> bool:
        return self._sending is not None or super()._has_asked()

    def connection_lost(self, exc: BaseException | None) -> None:
        """End what waits on the caller's behalf."""
        self._stop_timer()
        super().connection_lost(exc)
        self.end_waiting()

    def close(self) -> None:
        """Close once the current request is answered."""
        self._closing = True
        super().close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:  # noqa: ASYNC109 - aiohttp's signature
        """Let the current send finish within `timeout` seconds, and close."""
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
        yield from super()._deadlines(now, limits)
        request = self.current_request
        if request is not None and not request.content.is_eof() and self._body_since != NEVER:
            yield "body_stalled", has_passed(self._heard_at, now, limits.stall_seconds)
            yield "body_too_slow", not self.between_lines and has_passed(self._body_since, now, limits.body_seconds)

    def _last_answer(self, problem: Problem) -> web.StreamResponse:
        return problem_answer(problem, close=True)


class BodyReader:
    """Reads bodies within the limits of one, and of all that are being read at once."""

    def __init__(self, limits: Limits, budget: Budget) -> None:
        self._limit = limits.request_bytes
        self._budget = budget

    async def read(self, request: Request | PlainSend) -> bytes:
        """Return the whole body; raises `InvalidMessage` (413) or `TryAgain` (429)."""
        if isinstance(request, PlainSend) or request.has_arrived:
            body = request.body if isinstance(request, PlainSend) else request.content.read_nowait()
            if len(body) > self._limit:
                self._refuse(f"{len(body)} bytes")
            return body
        content, length = request.content, request.content_length
        if length is not None and length > self._limit:
            self._refuse(f"{length} bytes")
        uid = request.caller.uid  # only what has arrived, not the announced length, counts towards its share
        start_body(request, self._budget, length or 1)
        received = bytearray()
        try:
            while chunk := await content.readany():
                if len(received) + len(chunk) > self._limit:
                    self._refuse(f"more than {self._limit} bytes")
                self._budget.take(len(chunk), uid)
                received += chunk
            return bytes(received)
        finally:
            self._budget.give_back(len(received), uid)

    async def decode(self, request: Request | PlainSend, kind: type[T]) -> T:
        """Return the body, which has to be JSON, decoded; raises as `check_media`, `read` and `decode_body` do."""
        check_media(request, JSON)
        return decode_body(await self.read(request), kind)

    def _refuse(self, size: str) -> NoReturn:
        detail = f"the request has {size}, the limit is {self._limit}: send less, or raise limits.request_bytes"
        raise InvalidMessage.of("request_too_large", detail)


def start_body(request: Request, budget: Budget, size: int) -> None:
    """Start the body's deadline, and send `100 Continue` to a caller that waits for it.

    Such a caller is refused (429) where `budget` has no room for its `size` bytes now, before it has sent them.
    """
    request.connection.begin()
    if not expects_more(request):
        return
    budget.ask(size, request.caller.uid)
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def expects_more(request: Request) -> bool:
    """Return whether the caller waits for `100 Continue`; raises `InvalidMessage` (417) for any other expectation."""
    expect = request.headers.get(hdrs.EXPECT)
    if expect is None or request.version != HttpVersion11:
        return False
    if expect.lower() != "100-continue":
        detail = "the only expectation that can be met is 100-continue: omit any other"
        raise InvalidMessage.of("expectation_failed", detail)
    return True


def check_media(request: Request | PlainSend, media: str | None) -> None:
    """Refuse (415) a body that is compressed, or not `media` in UTF-8 (None: the handler checks it)."""
    headers = request.headers
    is_encoded = any(coding.strip().lower() != "identity" for coding in headers.getall(hdrs.CONTENT_ENCODING, ()))
    if is_encoded or headers.get(hdrs.TRANSFER_ENCODING, "chunked").strip().lower() != "chunked":
        raise InvalidMessage.of("unsupported_encoding", "send the body as it is, without Content-Encoding")
    if media is not None and not is_media(headers.get(hdrs.CONTENT_TYPE, ""), media):
        raise InvalidMessage.of("unsupported_media_type", f"the Content-Type must be {media}, in UTF-8")


def decode_body(data: bytes, kind: type[T]) -> T:
    """Decode a JSON body; raises `InvalidMessage` that names what is wrong, also for duplicate keys."""
    refuse_too_many_values(data, MAX_VALUES)
    try:
        decoded = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        field, sentence = shape_fault(error, kind)
        raise InvalidMessage.of("invalid_field", sentence, field=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = f"the body must be one JSON object in UTF-8: {json_fault(error, data)}"
        raise InvalidMessage.of("invalid_json", detail) from error
    refuse_duplicate_keys(data)
    return decoded


class Answer(web.StreamResponse):
    """One complete answer, whose bytes are ready before they are written; `headers` are lines that end in CRLF.

    An aiohttp response builds a case-insensitive multi-dict of headers and serialises it again, which is a large part
    of what a send costs. This is the same on the wire, and obeys the same contract (prepare, write_eof).
    """

    def __init__(self, status: int, body: bytes, media: str = JSON, headers: str = "") -> None:
        # The base's constructor makes the dictionaries that this class exists to avoid.
        self._status = status
        self._body_bytes = body
        about_body = (
            "" if status == HTTPStatus.NO_CONTENT else f"Content-Type: {media}\r\nContent-Length: {len(body)}\r\n"
        )
        self._head = f"{_START[status]}{about_body}Date: {_date(int(time.time()))}\r\n{headers}"
        self._keep_alive = None
        self._written = False

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        """Write everything, once, then wait for a slow reader to make room: unread answers cannot pile up.

        Raises `ConnectionResetError` where the caller has disconnected.
        """
        if self._written:
            return None
        self._written = True
        if self._keep_alive is None:
            self._keep_alive = request.keep_alive
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the caller has disconnected")
        transport.write(
            self.encode(
                with_body=request.method != hdrs.METH_HEAD,
                connection="Connection: keep-alive\r\n" if request.version == HttpVersion10 else "",
            )
        )
        self._body_bytes = b""  # the transport has what is still to be read: once is enough
        if request.protocol.writing_paused:
            await request.writer.drain()
        return None

    def encode(self, *, with_body: bool = True, connection: str = "") -> bytes:
        """Return the bytes of the answer; `connection` is its `Connection` line unless it ends the connection."""
        if self._keep_alive is False:
            connection = "Connection: close\r\n"
        return f"{self._head}{connection}\r\n".encode("latin-1") + (self._body_bytes if with_body else b"")

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: an answer is complete from the start."""


def stream_answer(media: str, **fields: str) -> web.StreamResponse:
    """Begin an answer that is written piece by piece, without aiohttp's word of what it is built with."""
    return web.StreamResponse(headers={"Content-Type": media, "Server": SERVER, **fields})


def json_answer(value: Any, status: int = 200) -> Answer:
    """Answer with `value` encoded by msgspec."""
    return Answer(status, _encode(value))


def problem_answer(problem: Problem, headers: Mapping[str, str] | None = None, *, close: bool = False) -> Answer:
    """Answer with `problem` (RFC 9457), and with its headers; `close` ends the connection after it."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in {**(headers or {}), **problem_headers(problem)}.items())
    answer = Answer(problem.status, _encode(problem), PROBLEM_JSON, lines)
    if close:
        answer.force_close()
    return answer


def problem_of(status: int, code: str, detail: str, **members: Any) -> Problem:
    """Build a problem that is answered without being raised."""
    return PostroomError.of(code, detail, status=status, **members).problem


@lru_cache(maxsize=1)
def _date(second: int) -> str:
    """Return the `Date` header's value, formatted once a second."""
    return formatdate(second, usegmt=True)
