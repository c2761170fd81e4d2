"""The sockets that programs listen on: a Unix socket with its final mode from the start, and a loopback TCP one.

A stale socket file is replaced; a live one, a symlink or any other file in the way ends the process with a sentence
(docs/contract/send.md#send-2). Sockets that systemd passes in are used as they are and never come through here.

aiohttp bounds how long a connection idles, before a request and between two, and nothing else. `TimedConnection`
remembers since when its peer owes something, and `TimedServer.sweep` drops those that are overdue
(docs/contract/bad-input.md#bad-input-1). For that it uses private names of aiohttp, in this file alone, and aiohttp
has an upper bound.
"""

import asyncio
import errno
import fcntl
import grp
import os
import select
import socket
import ssl
import stat
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, cast
from weakref import WeakSet

import structlog
from aiohttp import web
from aiohttp.http_exceptions import (
    BadHttpMessage,
    BadHttpMethod,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
    PayloadEncodingError,
)
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from postroom._wire.transport import MAX_SOCKET_PATH
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import give_up, private_directory, why_refused
from postroom.chassis.routes import BROKEN_BODY, INTERNAL_ERROR, problem_response
from postroom.chassis.runtime import in_step
from postroom.errors import PostroomError, Problem

BACKLOG: Final = 1024  # connections that wait to be accepted
_LONGEST_WAIT: Final = 2.0  # seconds for others that start in the same directory
_LOOK_AGAIN: Final = 0.005  # seconds
PRIVATE: Final = 0o600
SHARED: Final = 0o660  # with a group
_log = structlog.get_logger(__name__)


SWEEP_SECONDS: Final = 1.0
_SWEPT_AT_ONCE: Final = 100  # connections
_EXAMINED: Final = 100  # connections at most, to find one that is idle
_MOST_UNREAD: Final = 64 * 1024 * 1024  # bytes of answers that peers do not read
TOO_MUCH_UNREAD: Final = "too_much_unread"  # why a connection was dropped
_MOST_FIELDS: Final = 100  # of the head of a request (docs/contract/bad-input.md#bad-input-9)
_NOT_HTTP: Final = "the request is not HTTP/1.1"
_REFUSED: Final[dict[type[BaseException], str]] = {
    LineTooLong: "a line of the request's head is too long",
    BadHttpMethod: "the request's method is not valid",
    InvalidURLError: "the request's target is not valid",
    InvalidHeader: "a header field of the request is not well formed",
    PayloadEncodingError: str(BROKEN_BODY.detail),
}
_WRONG_HEADS: Final = {  # as the parser begins to say it, which has no class of its own for these
    "Duplicate '": "a header field that a request has once, such as Host, is there twice",
    "Missing 'Host'": "the request has no Host header",
    "Too many headers": "the request has too many header fields",
}
NEVER: Final = 0.0  # "no such moment yet"; the loop's clock never reads zero here


def unix_listener(path: Path, group: str | None = None) -> socket.socket:
    """Listen on `path`, 0600 or (for `group`) 0660, and return the socket; connections wait to be accepted.

    The mode is there when the file appears; the group is set before anyone can connect. Raises `Fatal`.
    """
    refuse_path(path)
    gid = None
    if group is not None:
        try:
            gid = grp.getgrnam(group).gr_gid
        except KeyError as error:
            detail = f"the socket's group {group!r} does not exist on this machine: create it, or configure another"
            raise Fatal(Exit.CONFIG, detail) from error
    try:
        private_directory(path.parent)
        with _only_starter(path.parent):
            refuse_path(path)
            path.unlink(missing_ok=True)  # stale: no process answers on it
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            mode = PRIVATE if gid is None else SHARED
            before = os.umask(0o777 & ~mode)  # bind(2) creates the file with 0777 less the umask
            try:
                sock.bind(str(path))
            except OSError:
                sock.close()
                raise
            finally:
                os.umask(before)
            if gid is not None:
                os.chown(path, -1, gid)  # nobody can have connected: the socket does not listen yet
            sock.listen(BACKLOG)
            return sock
    except OSError as error:
        detail = f"cannot create the socket {path}: {why_refused(error, 'configure another path')}"
        raise Fatal(Exit.CONFIG, detail) from error


def tcp_listener(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Bind a port (0: a free one) and return the socket; raises `Fatal` where it is taken, or `host` is not local."""
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise Fatal(Exit.UNAVAILABLE, f"cannot listen on {host}:{port}: {error.strerror}; configure another") from error
    return sock


def refuse_path(path: Path) -> None:
    """Raise `Fatal` where `path` is too long, is not a socket, or is one that a running process answers on."""
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        detail = f"the socket path {path} has {length} bytes, the system allows {MAX_SOCKET_PATH}: choose a shorter one"
        raise Fatal(Exit.CONFIG, detail)
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        detail = f"cannot check the socket path {path}: {error.strerror}; configure another path"
        raise Fatal(Exit.CONFIG, detail) from error
    if stat.S_ISLNK(mode):
        raise Fatal(Exit.CONFIG, f"{path} is a symbolic link: remove it or configure another path")
    if not stat.S_ISSOCK(mode):
        raise Fatal(Exit.CONFIG, f"{path} exists and is not a socket: remove it or configure another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        code = probe.connect_ex(str(path))
    if code not in (errno.ECONNREFUSED, errno.ENOENT):
        raise Fatal(Exit.UNAVAILABLE, f"already running: a process answers on {path}; stop it first")


def remove(path: Path, inode: int) -> None:
    """Remove the socket file `path` where it is still the one with `inode`, not a successor's."""
    if is_still(path, inode):
        with suppress(OSError):
            path.unlink()


def is_still(path: Path, inode: int) -> bool:
    """Return whether the file `path` is there, and is the one with `inode`."""
    with suppress(OSError):
        return path.lstat().st_ino == inode
    return False


@contextmanager
def _only_starter(directory: Path) -> Iterator[None]:
    """Keep two programs that start at once from taking each other's fresh socket for a stale one.

    They wait for each other, which takes as long as a bind. Any process that may read the directory can lock it, so the
    wait is limited.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    deadline = time.monotonic() + _LONGEST_WAIT
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_LOOK_AGAIN)
            else:
                break
        yield
    finally:
        os.close(fd)


class Deadlines(NamedTuple):
    """How slow a peer may be, in seconds: those of a reader of pages, where a config has no others."""

    header_seconds: float = 10.0  # for the head of a request, from its first byte
    body_seconds: float = 30.0  # for the body of a request
    stall_seconds: float = 30.0  # without an answer being read
    idle_seconds: float = 75.0  # between two requests; aiohttp itself enforces it


_OF_PAGES: Final = Deadlines()


class TimedConnection(RequestHandler):
    """A peer's connection; the server's sweep drops it once it is `overdue`."""

    __slots__ = ("_blocked_since", "_head_since", "_heard_at", "_last_body", "_last_target", "_server", "half_closed")

    def __init__(self, server: web.Server, *, loop: asyncio.AbstractEventLoop, **options: Any) -> None:
        super().__init__(server, loop=loop, **options)
        self._server = cast(TimedServer, server)
        self._head_since = NEVER
        self._heard_at = NEVER
        self._blocked_since = NEVER
        self._last_body: StreamReader | None = None
        self._last_target = ""
        self.half_closed = False  # or closed altogether: over TCP both look alike

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
            message, body = self._messages[-1]
            before, self._last_body = self._last_body, body
            if isinstance(message, RawRequestMessage):
                self._last_target = message.path
            elif before is not None and not before.is_eof():
                before.set_exception(RequestPayloadError("it does not match its headers"))  # the parser gave up within
        elif self._head_since == NEVER and not (self.busy and self._request_count):  # before its first it only seems so
            self._head_since = self._heard_at

    def eof_received(self) -> bool:  # type: ignore[override] # asyncio's contract: True keeps the other half open
        """Answer complete requests before closing; nothing more will come. TLS has no half-close."""
        if self.transport is None or self.transport.get_extra_info("sslcontext") is not None or not self._has_asked():
            return False
        if self._messages and not self._messages[-1][1].is_eof():
            self._messages.pop()  # its rest will never come
        self.half_closed = True
        self.end_after_last()
        return True

    def _has_asked(self) -> bool:
        """Return whether a request has arrived whole that is not answered yet; only the newest may be incomplete."""
        unanswered = len(self._messages) + (self._waiter is None)
        return self._last_body is not None and unanswered > (not self._last_body.is_eof())

    def end_after_last(self) -> None:
        """After a half-close: close once the current request is answered, if no other has arrived."""
        if self.half_closed and not self._messages:
            self.close()

    def _has_hung_up(self) -> bool:
        """Return whether the peer has closed its socket, and not only finished sending."""
        if self.transport is None:
            return False
        poller = select.poll()
        poller.register(self.transport.get_extra_info("socket").fileno(), 0)
        return any(events & select.POLLHUP for _, events in poller.poll(0))

    def resume_reading(self, resume_parser: bool = True) -> None:  # noqa: FBT001, FBT002 - aiohttp's signature
        """Go on reading where reading was paused; aiohttp would parse nothing, twice a request, where it was not."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    def pause_writing(self) -> None:
        """Remember since when the peer has not read its answers, and what the server has to keep of them."""
        super().pause_writing()
        self._blocked_since = self._loop.time()
        self._server.hold_unread(self, cast(asyncio.Transport, self.transport).get_write_buffer_size())

    def resume_writing(self) -> None:
        """Forget it: the peer reads again."""
        super().resume_writing()
        self._blocked_since = NEVER
        self._server.release_unread(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget it as well."""
        self._server.release_unread(self)
        super().connection_lost(exc)

    @property
    def busy(self) -> bool:
        """Whether a request is being answered or waits for its turn."""
        return self._waiter is None or self._waiter.done()

    @property
    def current_request(self) -> web.BaseRequest | None:
        """The request that is being answered."""
        return self._current_request

    @property
    def idle_since(self) -> float | None:
        """Since when (loop time) nothing has been going on here; None while something is."""
        return None if self.busy else self._heard_at

    def overdue(self, now: float, limits: Deadlines) -> str | None:
        """Return which deadline has passed, or None."""
        return next((reason for reason, passed in self._deadlines(now, limits) if passed), None)

    def _deadlines(self, now: float, limits: Deadlines) -> Iterator[tuple[str, bool]]:
        yield "caller_gone", self.half_closed and self._has_hung_up()
        yield "reply_not_read", has_passed(self._blocked_since, now, limits.stall_seconds)
        yield "head_too_slow", has_passed(self._head_since, now, limits.header_seconds)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer what the parser refused, or what escaped a handler, as a problem, and close.

        The parser's text quotes what it read: neither an answer nor a log repeats it, since it may hold a token.
        """
        del message
        if isinstance(exc, ConnectionError):
            raise exc  # the peer has disconnected
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is already being sent")
        if status < HTTPStatus.INTERNAL_SERVER_ERROR:
            return self._last_answer(PostroomError.of("bad_request", _why_refused(exc), status=status).problem)
        _log.error("unforeseen_error", exc_info=exc)
        return self._last_answer(INTERNAL_ERROR)

    def _last_answer(self, problem: Problem) -> web.StreamResponse:
        return problem_response(problem, close=True)

    def abort(self) -> None:
        """Drop the connection without waiting for anything to be read."""
        if self.transport is not None:
            self.transport.abort()


def _why_refused(error: BaseException | None) -> str:
    said = error.message if isinstance(error, BadHttpMessage) else ""
    heads = (text for beginning, text in _WRONG_HEADS.items() if said.startswith(beginning))
    kinds = (text for kind, text in _REFUSED.items() if isinstance(error, kind))
    return next(chain(heads, kinds), _NOT_HTTP)


def may_be_gone(request: web.BaseRequest) -> bool:
    """Return whether the caller may no longer be waiting for the answer to a request."""
    transport, connection = request.transport, request.protocol
    return (
        transport is None
        or transport.is_closing()
        or (isinstance(connection, TimedConnection) and connection.half_closed)
    )


class TimedServer(web.Server):
    """An aiohttp server that drops the connections of peers that are too slow, for as long as `sweep` runs."""

    connection_type: ClassVar[type[TimedConnection]] = TimedConnection

    def __init__(
        self,
        handler: Any,
        *,
        deadlines: Deadlines,
        on_drop: Callable[[str], None],
        request_factory: Callable[..., Any],
        **options: Any,
    ) -> None:
        def begin(message: Any, payload: StreamReader, protocol: TimedConnection, writer: Any, task: Any) -> Any:
            protocol.end_after_last()
            return request_factory(message, payload, protocol, writer, task)

        super().__init__(handler, keepalive_timeout=deadlines.idle_seconds, request_factory=cast(Any, begin), **options)
        self._deadlines = deadlines
        self._on_drop = on_drop
        self._running_loop = asyncio.get_running_loop()

    def __call__(self) -> RequestHandler:
        """Make the protocol of a new connection (aiohttp and asyncio call this)."""
        return self.connection_type(self, loop=self._running_loop, **self._kwargs)

    @abstractmethod
    def hold_unread(self, connection: TimedConnection, size: int) -> None:
        """Count `size` bytes of an answer that a peer does not read, and drop a connection where that is too much."""

    @abstractmethod
    def release_unread(self, connection: TimedConnection) -> None:
        """Count what was held for a connection no more; may be called where nothing is."""

    async def sweep(self) -> None:
        """Drop connections whose deadline has passed, once a second, for ever; few at a time."""
        while True:
            await asyncio.sleep(in_step(SWEEP_SECONDS))
            now = self._running_loop.time()
            connections = cast("list[TimedConnection]", self.connections)
            for start in range(0, len(connections), _SWEPT_AT_ONCE):
                self.drop_overdue(now, connections[start : start + _SWEPT_AT_ONCE])
                await asyncio.sleep(0)

    def drop_overdue(self, now: float, connections: Sequence[TimedConnection] | None = None) -> None:
        """Drop those connections, or all, whose deadline has passed at `now` (loop time), and pass `on_drop` why."""
        for connection in cast("list[TimedConnection]", self.connections) if connections is None else connections:
            if (reason := connection.overdue(now, self._deadlines)) is not None:
                self._on_drop(reason)
                connection.abort()


class LimitedServer(TimedServer):
    """A server with a limit on connections: an idle one makes room for a new one.

    Of answers that nobody reads it keeps so many bytes, for all peers together: the peer that has not read for longest
    makes room.
    """

    def __init__(self, handler: Any, *, most: int, on_drop: Callable[[str], None], **options: Any) -> None:
        super().__init__(handler, on_drop=on_drop, **options)
        self._most = most
        self._unread: OrderedDict[TimedConnection, int] = OrderedDict()  # bytes; who has not read for longest is first
        self._unread_bytes = 0
        self._open: OrderedDict[TimedConnection, None] = OrderedDict()  # the least recently examined first

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Accept the connection; where there are too many, drop an idle one, or itself where none of the next is."""
        super().connection_made(handler, transport)
        newcomer = cast(TimedConnection, handler)
        if len(self._open) >= self._most:
            examined = list(islice(self._open, _EXAMINED))
            idle = next((each for each in examined if each.idle_since is not None), newcomer)
            for each in examined:
                self._open.move_to_end(each)
            self._open.pop(idle, None)
            self._on_drop("too_many_connections")
            idle.abort()
        self._open[newcomer] = None

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Forget the connection."""
        super().connection_lost(handler, exc)
        self._open.pop(cast(TimedConnection, handler), None)

    def hold_unread(self, connection: TimedConnection, size: int) -> None:
        """Count it, and make room where there is too much."""
        self._unread[connection] = size
        self._unread_bytes += size
        while self._unread_bytes > _MOST_UNREAD:
            oldest = next(iter(self._unread))
            self.release_unread(oldest)
            self._on_drop(TOO_MUCH_UNREAD)
            oldest.abort()

    def release_unread(self, connection: TimedConnection) -> None:
        """Count it no more."""
        self._unread_bytes -= self._unread.pop(connection, 0)


@asynccontextmanager
async def running(
    app: web.Application,
    shutdown_seconds: float,
    *,
    most: int,
    on_drop: Callable[[str], None],
    deadlines: Deadlines = _OF_PAGES,
    **options: Any,
) -> AsyncIterator[web.ServerRunner]:
    """Run an application on a server of `most` connections, which drops those of peers that are too slow.

    Each that is dropped is passed to `on_drop`, with the reason; `options` are aiohttp's. At the end the requests at
    work have `shutdown_seconds` to finish.
    """
    prepared = web.AppRunner(app, handle_signals=False)
    await prepared.setup()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(prepared.cleanup)
        inner = cast(web.Server, prepared.server)
        server = LimitedServer(
            inner.request_handler,
            most=most,
            deadlines=deadlines,
            on_drop=on_drop,
            request_factory=inner.request_factory,
            access_log=None,
            max_headers=_MOST_FIELDS,
            **options,
        )
        runner = web.ServerRunner(server, shutdown_timeout=shutdown_seconds)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        sweep = asyncio.create_task(server.sweep())
        stack.callback(sweep.cancel)
        yield runner


_servers: Final = WeakSet[Any]()  # of this process: what an event loop calls a server, with its sockets


def _leave_to_parent() -> None:
    """Give up the ports in a forked child: one that outlives its killed parent would keep them from the next one."""
    for server in _servers:
        for sock in server.sockets:
            give_up(sock.fileno())


os.register_at_fork(after_in_child=_leave_to_parent)


async def listening(runner: web.BaseRunner, host: str, port: int, tls: ssl.SSLContext | None = None) -> str:
    """Listen on a TCP port and return the URL; raises `Fatal` (69) where it is taken."""
    site = web.TCPSite(runner, host, port, ssl_context=tls)
    try:
        await site.start()
    except OSError as error:
        detail = f"cannot listen on {host}:{port}: {error.strerror}; configure another address"
        raise Fatal(Exit.UNAVAILABLE, detail) from error
    _servers.add(site._server)  # noqa: SLF001 - aiohttp has no other way to the sockets
    bound, number = runner.addresses[0][:2]
    return f"{'http' if tls is None else 'https'}://{f'[{bound}]' if ':' in bound else bound}:{number}"


def has_passed(since: float, now: float, seconds: float) -> bool:
    """Return whether more than `seconds` lie between `since` and `now`; never where `since` is `NEVER`."""
    return since != NEVER and now - since > seconds
