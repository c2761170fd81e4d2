"""HTTP to one peer, over a Unix socket or a URL, and where a daemon's socket is (docs/contract/send.md#send-1).

Every failure becomes one `PostroomError`. An answer is read up to a limit, redirects are never followed, and an answer
that is not Postroom's is `Unavailable`. Both clients are made of `Calls`: a transport, patience, and the two ways to
call, reading and changing.
"""

from __future__ import annotations

import errno
import json
import os
import warnings
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cached_property, partial
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, Self, TypeVar, cast
from urllib.parse import urlencode

import msgspec

from postroom._wire.arguments import BYTES, plain_scalar
from postroom._wire.http import Garbled, Head, Site, Unreachable, lines_of, why_unreachable
from postroom._wire.retry import Patience, retrying, retrying_unless_arrived
from postroom._wire.words import not_text, shape_fault, value_fault
from postroom.errors import PROBLEM_JSON, InvalidMessage, NotPermitted, PostroomError, Problem, Unavailable, error_for

if TYPE_CHECKING:
    from postroom._wire.connections import Connection, Pool

SYSTEM_DIRECTORY: Final = Path("/run/postroom")
MAX_SOCKET_PATH: Final = 107  # bytes; sockaddr_un leaves no room for more
JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
SQLITE: Final = "application/vnd.sqlite3"
EVENT_STREAM: Final = "text/event-stream"
MAX_ANSWER: Final = 32 * 1024 * 1024  # bytes
MAX_LINE: Final = 64 * 1024  # bytes of one line of an NDJSON answer
MAX_REASON: Final = 300  # characters of a foreign error that a sentence quotes

_UNKNOWN: Final = "; it is not known whether the request took effect: "
_SAFE: Final = "repeat it, which is safe"

_decode_problem: Final = msgspec.json.Decoder(Problem).decode

T = TypeVar("T")


def find_socket(socket: Path | str | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return `socket`, else `POSTROOM_SOCKET`, else the only socket in the directories where daemons put theirs.

    Raises `Unavailable` that says what to set or to start where there is no socket, or more than one.
    """
    if named := socket or environ.get("POSTROOM_SOCKET"):
        socket = Path(named)
        length = len(os.fsencode(socket))
        if length > MAX_SOCKET_PATH:
            detail = f"the socket path has {length} bytes, the limit is {MAX_SOCKET_PATH}: {socket}"
            raise Unavailable.of("socket_path_too_long", detail)
        return socket
    directories = [SYSTEM_DIRECTORY]
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        directories.insert(0, Path(runtime) / "postroom")
    found = [file for directory in directories for file in _sockets(directory)]
    if len(found) == 1:
        return found[0]
    if found:
        choice = ", ".join(map(str, found))
        detail = f"several daemons run here: set POSTROOM_SOCKET to one of {choice}"
        raise Unavailable.of("socket_ambiguous", detail)
    places = " or ".join(map(str, directories))
    detail = f"there is no daemon's socket in {places}: start one (`postroom up`), or set POSTROOM_SOCKET"
    raise Unavailable.of("daemon_absent", detail, retryable=True)


def _sockets(directory: Path) -> list[Path]:
    try:
        return sorted(file for file in directory.glob("*.sock") if file.is_socket())
    except OSError:
        return []  # a directory that cannot be read holds no socket for this user


class Peer(NamedTuple):
    """The "daemon" or the "broker" (`role`) expected at `address`, and the `remedy` where it is absent.

    Turns a failure to talk to it into an error whose sentence names the peer and says what to do.
    """

    role: str
    address: str
    remedy: str

    def __str__(self) -> str:
        return f"the {self.role} at {self.address}"

    def failure(self, error: Exception, unsure: str | None = None) -> PostroomError:
        """Build the error for a connection that failed; `unsure` says how to go on where a change may have happened."""
        cause = error.__cause__ if isinstance(error, Unreachable) else None
        match cause or error:
            case FileNotFoundError() | ConnectionRefusedError():
                reason = "nothing listens there"
            case PermissionError():
                detail = f"{self} refuses the connection: {os.strerror(errno.EACCES)}; use an account that may"
                return NotPermitted.of("socket_not_permitted", detail)
            case TimeoutError():
                advice = ": it hangs or is overloaded; try again, or see `postroom doctor`"
                if unsure is not None and cause is None:
                    advice = f"{_UNKNOWN}{unsure}"
                return Unavailable.of("no_answer", f"{self} did not answer in time{advice}", retryable=True)
            case Garbled():
                return self.foreign(str(error))
            case OSError(errno=errno.ENOTSOCK | errno.ENOTDIR | errno.EPROTOTYPE):
                reason = "that is not a socket"
            case OSError() as untrusted if hasattr(untrusted, "verify_message"):
                why = why_unreachable(untrusted, "SSL_CERT_FILE, or as `ca_file`")
                return Unavailable.of(
                    f"{self.role}_absent", f"no safe connection to {self}: {why}, then try again", retryable=True
                )
            case other if cause is not None:
                reason = why_unreachable(other, "SSL_CERT_FILE")
            case _:
                return self.lost(unsure)
        detail = f"no {self.role} at {self.address} ({reason}): {self.remedy}"
        return Unavailable.of(f"{self.role}_absent", detail, retryable=True)

    def lost(self, unsure: str | None = None) -> Unavailable:
        """Build the error for a connection that broke before the answer was complete."""
        advice = ": try again, a message under its id" if unsure is None else f"{_UNKNOWN}{unsure}"
        return Unavailable.of("connection_lost", f"the connection to {self} broke{advice}", retryable=True)

    def refusal(self, status: int, media: str, data: bytes) -> NoReturn:
        """Raise the problem that the peer answered with, or an error for an answer that is not a problem."""
        if media != PROBLEM_JSON:
            retryable = status >= HTTPStatus.INTERNAL_SERVER_ERROR
            raise self.foreign(f"it answered {status} as {media}, not as a problem", retryable=retryable)
        try:
            problem = _decode_problem(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.foreign(f"it answered {status} with a problem that can't be read: {error}") from error
        if problem.status != status:
            raise self.foreign(f"it answered {status} with a problem of status {problem.status}")
        raise error_for(problem)

    def foreign(self, reason: str, *, retryable: bool = False) -> Unavailable:
        """Build the error for an answer of another program, or of another version of Postroom."""
        detail = f"{self} is not part of Postroom, or has another version: {reason[:MAX_REASON]}; check the address"
        return Unavailable.of("not_understood", detail, retryable=retryable)


class Exchanges(Protocol):
    """The connections of a transport: those of an event loop (`Pool`), or blocking ones (`BlockingPool`)."""

    async def exchange(
        self, request: bytes, *, seconds: float, connecting: float, limit: int, repeatable: bool
    ) -> tuple[Head, bytes]:
        """Send a request and return its answer."""

    async def close(self) -> None:
        """Close every connection."""


class Transport:
    """Requests to one peer, whose address is `base`, over `pool`; one exchange may take `timeout` seconds.

    `headers` go with every request.
    """

    def __init__(
        self, pool: Exchanges, base: str, peer: Peer, timeout: float, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._pool = pool
        self._base = base
        self._headers = headers
        self.timeout = timeout
        self.peer = peer

    async def close(self) -> None:
        """Close every connection; a second call does nothing."""
        await self._pool.close()

    async def call(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        body: Any = None,
        media: str = JSON,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        waiting: float = 0.0,
        unsure: str | None = None,
    ) -> T:
        """Send one request and decode its answer; the peer may take `waiting` seconds longer than usual.

        Raises `InvalidMessage`, the problem that the peer answered with, or `Unavailable`. A request that is not
        idempotent has in `unsure` how to go on where it is not known whether it took effect.
        """
        data: bytes | None = body if body is None or isinstance(body, bytes) else _json(body)
        framing = "" if method == "GET" else "Content-Length: 0\r\n"
        if data is not None:
            framing = f"Content-Type: {media}\r\nContent-Length: {len(data)}\r\n"
        request = self._request(method, path, query, headers, framing) + (data or b"")
        try:
            head, content = await self._pool.exchange(
                request,
                seconds=self.timeout + waiting,
                connecting=self.timeout,
                limit=MAX_ANSWER,
                repeatable=unsure is None,
            )
        except (Unreachable, Garbled, OSError) as error:
            raise self.peer.failure(error, unsure) from error
        if head.status >= HTTPStatus.MULTIPLE_CHOICES:
            self.peer.refusal(head.status, head.media, content)
        return self.decode(content, answer)

    @asynccontextmanager
    async def open(
        self,
        method: str,
        path: str,
        *,
        data: AsyncGenerator[bytes, None] | None = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        media: str = JSON,
        expected: str | None = None,
        silence: float | None = None,
    ) -> AsyncIterator[Connection]:
        """Send one request, whose body may come in pieces, and yield the connection to read a successful answer from.

        An answer has to be of the `expected` media type, where there is one: a page would be an empty or broken stream.
        The head of the answer may take `silence` seconds (as long as an exchange may take where that is not given);
        the rest has no limit.
        """
        framing = "" if data is None else f"Content-Type: {media}\r\nTransfer-Encoding: chunked\r\n"
        request = self._request(method, path, query, headers, framing)
        try:
            pool, connecting = cast("Pool", self._pool), self.timeout
            answered = pool.stream(request, data, connecting=connecting, silence=silence or connecting)
            async with answered as (head, connection):
                if head.status >= HTTPStatus.MULTIPLE_CHOICES:
                    self.peer.refusal(head.status, head.media, await self._whole(connection))
                if expected not in (None, head.media):
                    raise self.peer.foreign(f"it answered {head.status} as {head.media}, not as {expected}")
                yield connection
        except (Unreachable, Garbled, OSError) as error:
            raise self.peer.failure(error) from error

    def decode(self, data: bytes, answer: type[T]) -> T:
        """Decode an answer of the peer (an empty one is None); raises `Unavailable` where it has another form."""
        try:
            return msgspec.json.decode(data or b"null", type=answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self.peer.foreign(f"its answer can't be read: {error}") from error

    async def lines(
        self, answer: Connection, *, longest: int = MAX_LINE, silence: float | None = None
    ) -> AsyncIterator[list[bytes]]:
        """Yield the complete lines of each piece of an answer, as it comes; raises where none comes in time.

        A line may have `longest` bytes, and the peer may be silent for `silence` seconds (as long as an exchange may
        take where that is not given). Raises `Unavailable` too where the answer ends within a line.
        """
        rest = b""
        while piece := await answer.read(silence or self.timeout):
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > longest:
                raise self.peer.foreign(f"a line of its answer is longer than {longest} bytes")
            if lines:
                yield lines
        if rest:
            raise self.peer.lost()

    def _request(
        self, method: str, path: str, query: Mapping[str, str] | None, headers: Mapping[str, str] | None, framing: str
    ) -> bytes:
        """Format the head of a request; `path` is quoted, and goes out as it is: `..` is an id like any other."""
        prefix, always = self._site
        try:
            target = f"{prefix}{path}?{urlencode(query)}" if query else f"{prefix}{path}"
        except UnicodeEncodeError as error:
            raise InvalidMessage.of("invalid_query", f"{not_text(error)}: give text that is") from error
        more = lines_of(headers.items()) if headers else ""
        return f"{method} {target}{always}{more}{framing}\r\n".encode()

    @cached_property
    def _site(self) -> tuple[str, str]:
        """What precedes every path in the head of a request, and what follows it."""
        try:
            site = Site.of(self._base)
        except ValueError as error:
            form = f"give the {self.peer.role}'s address as http[s]://host[:port], without user, query or fragment"
            where = "commands take it from POSTROOM_BROKER_URL, or --url"
            raise Unavailable.of("not_understood", f"{form}; {where}") from error
        if site.is_exposed and "Authorization" in self._headers:
            advice = "use https, or a way that is encrypted"
            warnings.warn(f"others on the network can read the token that goes to {self._base}: {advice}", stacklevel=2)
        return site.prefix, f" HTTP/1.1\r\nHost: {site.authority}\r\n{lines_of(self._headers.items())}"

    async def _whole(self, answer: Connection) -> bytes:
        data = bytearray()
        while piece := await answer.read(self.timeout):
            data += piece
            if len(data) > MAX_ANSWER:
                raise Garbled(f"its answer is larger than {MAX_ANSWER} bytes")
        return bytes(data)


class Calls:
    """The base of a client: calls over one transport, retried for `patience` seconds (0: one try)."""

    def __init__(self, transport: Transport, patience: float) -> None:
        self._transport = transport
        self._patience_seconds = patience

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
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
        """Ask for what is only read, even by a POST."""
        method = "GET" if body is None else "POST"
        parameters = None if query is None else to_parameters(query)
        return await self._repeat(method, path, answer, query=parameters, body=body, waiting=waiting)

    async def _repeat(self, method: str, path: str, answer: type[T], **how: Any) -> T:
        """Ask for what is idempotent, until it succeeds, fails permanently, or patience ends."""
        call = partial(self._transport.call, method, path, answer, **how)
        return await retrying(call, self._patience())

    async def _change(
        self, method: str, path: str, answer: type[T], body: msgspec.Struct | None = None, *, unsure: str = _SAFE
    ) -> T:
        """Ask for a change; retried only where it certainly did not happen."""
        call = partial(self._transport.call, method, path, answer, body=body, unsure=unsure)
        return await retrying_unless_arrived(call, self._patience())


def _json(value: Any) -> bytes:
    """Encode the body of a request; refuses what JSON would drop or change: NaN in a filter would match everything."""
    try:
        json.dumps(msgspec.to_builtins(value, builtin_types=BYTES, enc_hook=plain_scalar), allow_nan=False)
        return msgspec.json.encode(value, enc_hook=plain_scalar)
    except UnicodeEncodeError as error:
        raise InvalidMessage.of("invalid_json", f"{not_text(error)}: give text that is") from error
    except (TypeError, ValueError, RecursionError) as error:
        detail = f"the request cannot be written as JSON: {value_fault(error)}"
        way = "give UTF-8 text, finite numbers, True, False, None"
        raise InvalidMessage.of("invalid_json", f"{detail}; {way}") from error


def to_parameters(query: msgspec.Struct) -> dict[str, str]:
    """Encode a query struct; what is not set is left out.

    Raises `InvalidMessage` for a value of another type: as text, a list or bytes would select nothing, without a word.
    """
    try:
        members: Any = msgspec.to_builtins(query, builtin_types=BYTES, enc_hook=plain_scalar)
        msgspec.convert(members, type(query), strict=False)
    except TypeError as error:
        raise InvalidMessage.of("invalid_query", f"check the query: {error}") from error
    except msgspec.ValidationError as error:
        field, sentence = shape_fault(error, type(query))
        raise InvalidMessage.of("invalid_query", f"check the query: {sentence}", field=field) from error
    if not isinstance(members, dict):
        sentence = f"the query must be a struct, as InboxQuery(limit=10), not {type(query).__name__}"
        raise InvalidMessage.of("invalid_query", sentence)
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in members.items()
        if value is not None
    }
