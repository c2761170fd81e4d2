"""Answers whose bytes are ready before they are written: one string of bytes, one write.

An aiohttp response builds a case-insensitive multi-dict of headers and serialises it again, which is a large part of
what a send costs. An `Answer` is the same on the wire, and obeys the same contract (prepare, write_eof).
"""

import time
from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10

from postroom.errors import PROBLEM_JSON, PostroomError, Problem

JSON: Final = "application/json"
MIN_RETRY_AFTER: Final = 1  # second: the header knows whole ones only

_encode: Final = msgspec.json.Encoder().encode
_START: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}


class Answer(web.StreamResponse):
    """One complete answer; `headers` are lines that end in CRLF."""

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
