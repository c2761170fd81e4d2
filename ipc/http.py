"""Requests and answers as the handlers see them: who asks, which route, a body that was read within limits; bytes back.

`Table` finds the route of a method and a target, matched as it was sent. Nothing is decoded or normalised on the way:
`/v1/%73end`, `//v1/send` and `/v1/../v1/send` are other paths, and 404.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, TypeVar

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10, HttpVersion11
from multidict import CIMultiDict

from ipc.shares import Budget, Limits
from outbox import Caller
from postroom._wire.administration import in_words
from postroom._wire.message import refuse_duplicate_keys, refuse_too_many_values, where
from postroom.chassis.routes import Route
from postroom.errors import PROBLEM_JSON, InvalidMessage, NotFound, PostroomError, Problem

if TYPE_CHECKING:
    from ipc.connection import Connection

T = TypeVar("T", bound=msgspec.Struct)
SEND: Final = "/v1/send"
MAX_SEGMENT: Final = 512  # characters of one variable part of a path
JSON: Final = "application/json"
MIN_RETRY_AFTER: Final = 1  # second: the header knows whole ones only

_encode: Final = msgspec.json.Encoder().encode
_START: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class Asked:
    """What every request has, however it was read: the connection that it came over, and its part of what is shared."""

    connection: Connection
    keeps_others_out = False  # whether it counts among those that the server answers at once

    @property
    def caller(self) -> Caller:
        """Who sent it: the peer of the connection."""
        return self.connection.caller

    async def take_turn(self, count: int) -> None:
        """Return when `count` bytes may be worked on for this caller: others have their turn too."""
        await self.connection.turns.take(self.caller.uid, count)

    def only_waits(self) -> None:
        """Note that the request has nothing left to do but to wait: it stays, and must keep no other out."""
        if self.keeps_others_out:
            self.keeps_others_out = False
            self.connection.requests.give_back(1, self.caller.uid)


class Request(Asked, web.BaseRequest):
    """A request that aiohttp has read; `params` are the variable parts of its path."""

    params: dict[str, str] = {}  # noqa: RUF012 - replaced, never changed: most paths have no variable part

    @property
    def connection(self) -> Connection:  # type: ignore[override] # never set
        """The connection that the request came over."""
        return self._protocol  # type: ignore[return-value] # every protocol of the server is one

    @property
    def has_arrived(self) -> bool:
        """Whether all of its body is there."""
        return self.content.is_eof()


class PlainSend(Asked):
    """A `POST /v1/send` that arrived whole and says nothing unusual, read without aiohttp (ipc/connection.py)."""

    method: Final = hdrs.METH_POST
    path: Final = SEND
    has_arrived: Final = True

    def __init__(self, connection: Connection, headers: CIMultiDict[str], body: bytes) -> None:
        self.connection = connection
        self.headers = headers
        self.body = body


class BodyReader:
    """Reads bodies within the limits of one, and of all that are being read at once."""

    def __init__(self, limits: Limits, budget: Budget) -> None:
        self._limit = limits.request_bytes
        self._budget = budget

    async def read(self, request: Request | PlainSend) -> bytes:
        """Return the whole body; raises `InvalidMessage` (413, 417) or `TryAgain` (429)."""
        if isinstance(request, PlainSend) or request.has_arrived:
            body = request.body if isinstance(request, PlainSend) else request.content.read_nowait()
            if len(body) > self._limit:
                self._refuse(f"{len(body)} bytes")
            return body
        content, length = request.content, request.content_length
        if length is not None and length > self._limit:
            self._refuse(f"{length} bytes")
        uid = request.caller.uid  # what has arrived, not what is promised, draws on its share of the budget
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

    def _refuse(self, size: str) -> NoReturn:
        detail = f"the request has {size}, the limit is {self._limit}: send less, or raise limits.request_bytes"
        raise InvalidMessage.of("request_too_large", detail)


def start_body(request: Request, budget: Budget, size: int) -> None:
    """Start the body's deadline, and tell a caller that waits for `100 Continue` to go on.

    Such a caller is refused (429) where `budget` has no room for its `size` bytes now: it has not sent them in vain.
    """
    request.connection.begin()
    expect = request.headers.get(hdrs.EXPECT)
    if expect is None or request.version != HttpVersion11:
        return
    if expect.lower() != "100-continue":
        raise InvalidMessage.of(
            "expectation_failed", "the only expectation that can be met is 100-continue: omit any other"
        )
    budget.ask(size, request.caller.uid)
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def check_media(request: Request | PlainSend, media: str | None) -> None:
    """Refuse (415) a body that is not `media` in UTF-8 (None: whatever the handler makes of it), or compressed."""
    headers = request.headers
    if headers.get(hdrs.CONTENT_ENCODING, "identity") != "identity":
        raise InvalidMessage.of("unsupported_encoding", "send the body as it is, without Content-Encoding")
    if media is not None and not _is_media(headers.get(hdrs.CONTENT_TYPE, ""), media):
        raise InvalidMessage.of("unsupported_media_type", f"the Content-Type must be {media}, in UTF-8")


@lru_cache(maxsize=64)
def _is_media(header: str, media: str) -> bool:
    kind, *parameters = (part.strip().lower() for part in header.split(";"))
    return kind == media and all(part in ("", "charset=utf-8", 'charset="utf-8"') for part in parameters)


def decode_body(data: bytes, kind: type[T]) -> T:
    """Decode a JSON body; raises `InvalidMessage` that names what is wrong, duplicate keys too."""
    refuse_too_many_values(data)
    try:
        decoded = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        field, sentence = where(error)
        raise InvalidMessage.of("invalid_field", in_words(sentence), field=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = f"the body must be one JSON object in UTF-8: {error}"
        raise InvalidMessage.of("invalid_json", detail) from error
    refuse_duplicate_keys(data)
    return decoded


class Found(NamedTuple):
    """A route, and the variable parts of the path that led to it."""

    route: Route
    params: dict[str, str]


class Table:
    """The routes, indexed: fixed paths by a dictionary, variable ones by their segments."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.fixed: Final[dict[tuple[str, str], Route]] = {}
        self._variable: Final[defaultdict[int, list[tuple[list[str], Route]]]] = defaultdict(list)
        for route in routes:
            if "{" in route.path:
                segments = route.path.split("/")
                self._variable[len(segments)].append((segments, route))
            else:
                self.fixed[route.method, route.path] = route

    def find(self, method: str, path: str) -> Found:
        """Return the route; raises `NotFound`, or a 405 where the path takes other methods."""
        if route := self.fixed.get((method, path)):
            return Found(route, {})
        candidates = list(self._candidates(path))
        for found in candidates:
            if found.route.method == method:
                return found
        if candidates:
            raise MethodNotAllowed(found.route.method for found in candidates)
        raise NotFound.of("no_such_route", "there is no such route: read GET /v1/openapi.json, which lists them all")

    def _candidates(self, path: str) -> Iterable[Found]:
        fixed = [route for (_, known), route in self.fixed.items() if known == path]
        if fixed:
            yield from (Found(route, {}) for route in fixed)
            return
        parts = path.split("/")
        for segments, route in self._variable.get(len(parts), ()):
            if (params := _match(segments, parts)) is not None:
                yield Found(route, params)


class MethodNotAllowed(PostroomError):
    """The path is there, for other methods (405); `allow` lists those it takes."""

    def __init__(self, methods: Iterable[str]) -> None:
        self.allow = ", ".join(sorted(set(methods)))
        super().__init__(problem_of(405, "method_not_allowed", f"this path accepts {self.allow}"))


def _match(segments: list[str], parts: list[str]) -> dict[str, str] | None:
    params = {}
    for segment, part in zip(segments, parts, strict=True):
        if segment.startswith("{"):
            if not part or len(part) > MAX_SEGMENT:
                return None
            params[segment[1:-1]] = part
        elif segment != part:
            return None
    return params


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
        """Write everything, once, then wait for a slow reader to make room: answers that nobody reads cannot pile up.

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
        if request.protocol.writing_paused:
            await request.writer.drain()
        return None

    def encode(self, *, with_body: bool = True, connection: str = "") -> bytes:
        """Return the bytes of the answer; one that does not end the connection says `connection` of it."""
        if self._keep_alive is False:
            connection = "Connection: close\r\n"
        return f"{self._head}{connection}\r\n".encode("latin-1") + (self._body_bytes if with_body else b"")

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing: an answer is complete from the start."""


def json_answer(value: Any, status: int = 200) -> Answer:
    """Answer with `value` encoded by msgspec."""
    return Answer(status, _encode(value))


def problem_answer(problem: Problem, headers: Mapping[str, str] | None = None, *, close: bool = False) -> Answer:
    """Answer with `problem` (RFC 9457), and `Retry-After` where it says when; `close` ends the connection after it."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    if problem.retry_after is not None:
        lines += f"Retry-After: {max(MIN_RETRY_AFTER, round(problem.retry_after))}\r\n"
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
