"""HTTP to one peer, over a Unix socket or a URL; every failure becomes one `PostroomError`.

An answer is read up to a limit, redirects are never followed, and what is no answer of Postroom's is `Unavailable`.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, TypeVar

import aiohttp
import msgspec
from aiohttp.typedefs import Query
from yarl import URL

from postroom.peer import Peer

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
LARGE_BODY: Final = 256 * 1024  # bytes
MAX_ANSWER: Final = 32 * 1024 * 1024  # bytes
MAX_LINE: Final = 64 * 1024  # bytes of one line of an NDJSON answer

T = TypeVar("T")


class Transport:
    """A pool of connections to one peer, closed by `close`; one exchange may take `timeout` seconds."""

    def __init__(self, session: aiohttp.ClientSession, base: str, peer: Peer, timeout: float) -> None:
        self._session = session
        self._base = base
        self.timeout = timeout
        self.peer = peer

    async def close(self) -> None:
        """Close every connection; a second call does nothing."""
        await self._session.close()

    async def call(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        body: Any = None,
        query: Query = None,
        headers: Mapping[str, str] | None = None,
        waiting: float = 0.0,
    ) -> T:
        """Send one request and decode its answer; the peer may take `waiting` seconds longer than usual.

        Raises the problem that the peer answered with, or `Unavailable`.
        """
        data: Any = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        if data is not None and len(data) > LARGE_BODY:
            data = io.BytesIO(data)  # aiohttp then sends it in pieces
        async with self.open(
            method, path, data=data, query=query, headers=headers, seconds=self.timeout + waiting
        ) as response:
            return self.decode(await self._read(response), answer)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        data: Any = None,
        query: Query = None,
        headers: Mapping[str, str] | None = None,
        media: str = JSON,
        seconds: float | None = None,
        silence: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send one request and yield its answer, whose status is a success.

        It may take `seconds`, and between two pieces of the answer `silence` seconds; without them, for ever.
        """
        content = {} if data is None else {"Content-Type": media}
        try:
            async with self._session.request(
                method,
                self._url(path),
                data=data,
                params=query,
                headers={**(headers or {}), **content},
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=seconds, sock_connect=self.timeout, sock_read=silence),
            ) as response:
                if response.status >= HTTPStatus.MULTIPLE_CHOICES:
                    self.peer.refusal(response.status, response.content_type, await self._read(response))
                yield response
        except (aiohttp.ClientError, OSError) as error:
            raise self.peer.failure(error) from error

    def _url(self, path: str) -> URL:
        """Build the address of `path`, which is quoted already and goes out as it is: `..` is an id like any other."""
        try:
            base = URL(self._base)
        except ValueError as error:
            raise aiohttp.InvalidURL(self._base) from error
        return base.with_path(base.raw_path.rstrip("/") + path, encoded=True)

    def decode(self, data: bytes, answer: type[T]) -> T:
        """Decode an answer of the peer (nothing at all reads as None); one that isn't ours is `Unavailable`."""
        try:
            return msgspec.json.decode(data or b"null", type=answer)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self.peer.foreign(f"its answer can't be read: {error}") from error

    async def lines(
        self, response: aiohttp.ClientResponse, *, longest: int = MAX_LINE, silence: float | None = None
    ) -> AsyncIterator[list[bytes]]:
        """Yield the complete lines of each piece of an answer, as it comes; raises where none comes in time.

        A line may have `longest` bytes, and the peer may be silent for `silence` seconds (as long as an exchange may
        take where that is not given).

        The time is kept here as well: aiohttp keeps none while a request still goes, and may drop the end of a
        connection that breaks at the very moment when the request ends.
        """
        rest = b""
        while piece := await self._piece(response, silence or self.timeout):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > longest:
                raise self.peer.foreign(f"a line of its answer is longer than {longest} bytes")
            if lines:
                yield lines

    async def _piece(self, response: aiohttp.ClientResponse, silence: float) -> bytes:
        try:
            async with asyncio.timeout(silence):
                return await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise self.peer.failure(error) from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > MAX_ANSWER:
                raise self.peer.foreign(f"its answer is larger than {MAX_ANSWER} bytes")
        return bytes(data)
