"""Where a daemon's socket is: `POSTROOM_SOCKET`, else the only one there is (docs/contract/send.md#send-1).

HTTP to one peer, over a Unix socket or a URL; every failure becomes one `PostroomError`. An answer is read up to a
limit, redirects are never followed, and what is not an answer of Postroom's is `Unavailable`. Both clients are made of
`Calls`: a transport, patience, and the two ways to call, reading and changing.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import aiohttp
import msgspec
from aiohttp.typedefs import Query
from yarl import URL

from postroom._wire.peer import Peer
from postroom._wire.retry import Patience, retrying, retrying_unless_arrived
from postroom.errors import Unavailable

SYSTEM_DIRECTORY: Final = Path("/run/postroom")
MAX_SOCKET_PATH: Final = 107  # bytes; sockaddr_un leaves no room for more
JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
LARGE_BODY: Final = 256 * 1024  # bytes
MAX_ANSWER: Final = 32 * 1024 * 1024  # bytes
MAX_LINE: Final = 64 * 1024  # bytes of one line of an NDJSON answer

T = TypeVar("T")


def find_socket(socket: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return `socket`, else `POSTROOM_SOCKET`, else the only socket that lies where daemons put theirs.

    Raises `Unavailable` that says what to set or to start where there is none, or more than one.
    """
    if named := socket or environ.get("POSTROOM_SOCKET"):
        socket = Path(named)
        length = len(os.fsencode(socket))
        if length > MAX_SOCKET_PATH:
            raise _unavailable(
                "socket_path_too_long", f"the socket path has {length} bytes, the limit is {MAX_SOCKET_PATH}: {socket}"
            )
        return socket
    directories = list(socket_directories(environ))
    found = [file for directory in directories for file in _sockets(directory)]
    if len(found) == 1:
        return found[0]
    if found:
        choice = ", ".join(map(str, found))
        raise _unavailable("socket_ambiguous", f"several daemons run here: set POSTROOM_SOCKET to one of {choice}")
    places = " or ".join(map(str, directories))
    raise _unavailable(
        "daemon_absent", f"there is no daemon's socket in {places}: start one (`postroom up`), or set POSTROOM_SOCKET"
    )


def socket_directories(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Name the directories where daemons put their sockets: the user's, then the system's."""
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        yield Path(runtime) / "postroom"
    yield SYSTEM_DIRECTORY


def _sockets(directory: Path) -> list[Path]:
    try:
        return sorted(file for file in directory.glob("*.sock") if file.is_socket())
    except OSError:
        return []  # a directory that can't be read holds no socket for us


def _unavailable(code: str, detail: str) -> Unavailable:
    return Unavailable.of(code, detail, retryable=code == "daemon_absent")


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
            # build the address of `path`, which is quoted already and goes out as it is: `..` is an id like any other
            try:
                base = URL(self._base)
            except ValueError as error:
                raise aiohttp.InvalidURL(self._base) from error
            async with self._session.request(
                method,
                base.with_path(base.raw_path.rstrip("/") + path, encoded=True),
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


class Calls:
    """The base of a client: calls over one transport, tried again for `patience` seconds (0: one try)."""

    def __init__(self, transport: Transport, patience: float) -> None:
        self._transport = transport
        self._patience_seconds = patience

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; a second call does nothing."""
        await self._transport.close()

    def _patience(self) -> Patience:
        return Patience(self._patience_seconds)

    async def _read(
        self,
        path: str,
        answer: type[T],
        *,
        query: msgspec.Struct | None = None,
        body: msgspec.Struct | None = None,
        waiting: float = 0.0,
    ) -> T:
        """Ask until it succeeds, fails for good, or patience ends: reading changes nothing, also with a body (POST)."""
        method = "GET" if body is None else "POST"
        parameters = None if query is None else to_parameters(query)
        return await retrying(
            lambda: self._transport.call(method, path, answer, query=parameters, body=body, waiting=waiting),
            self._patience(),
        )

    async def _change(self, method: str, path: str, answer: type[T], body: msgspec.Struct | None = None) -> T:
        """Ask for a change; tried again only where it surely did not happen."""
        return await retrying_unless_arrived(
            lambda: self._transport.call(method, path, answer, body=body), self._patience()
        )


def to_parameters(query: msgspec.Struct) -> dict[str, str]:
    """Encode a query struct; what is not set is left out."""
    members: dict[str, Any] = msgspec.to_builtins(query)
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in members.items()
        if value is not None
    }
