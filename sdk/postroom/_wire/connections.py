"""Connections of a client in an event loop: one exchange at a time on each, kept open for the next.

Promises: an exchange that ends without its whole answer (a time-out, a cancelled task, something that is not an answer)
closes its connection, and so does unsolicited data. So an answer always belongs to its request.
Fails with `Unreachable` where no connection could be opened, `Garbled`, `TimeoutError` or `ConnectionError`.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import cache
from http import HTTPStatus
from typing import Final, cast

from postroom._wire.http import NOT_TLS, AnswerReader, Garbled, Head, Site, Unreachable, chunk
from postroom._wire.sockets import BACKLOG_PAUSE, IDLE_SECONDS, try_to_connect

_PROBE_SECONDS: Final = 2.0  # that a handshake may take whose outcome only makes a better sentence
_ASKS_FOR_TLS: Final = re.compile(rb"HTTPS|SSL")  # in the page of a proxy that plain HTTP has reached
_MAX_UNREAD: Final = 256 * 1024  # bytes of a streamed answer that nobody has taken; then reading pauses

Dial = Callable[["Connection"], Awaitable[object]]


class Connection(asyncio.Protocol):
    """One connection; `fresh` until it has carried an exchange, `plain` where a URL asked for none with TLS."""

    def __init__(self, forget: Callable[[Connection], None]) -> None:
        self.fresh = True
        self.plain = False
        self.idle_since = 0.0
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answer: AnswerReader | None = None
        self._pieces: list[bytes] = []
        self._size = 0  # of the pieces
        self._limit: int | None = None  # of a whole answer; None for one that is streamed
        self._waiting: asyncio.Future[None] | None = None
        self._error: BaseException | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._upload: asyncio.Task[None] | None = None

    async def exchange(self, request: bytes, deadline: float, limit: int, *, cut: bool = False) -> tuple[Head, bytes]:
        """Send a whole request and return its whole answer, of at most `limit` bytes, by `deadline` (loop time).

        An answer that may be `cut` ends wherever something ends it once its head has come: the limit, the deadline, a
        break of the connection.
        """
        answer = self._ask(request, limit, opaque=cut)
        try:
            while not answer.ended:
                await self._wait(deadline)
        except (Garbled, OSError):
            if not cut or answer.head is None:
                raise
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        return cast(Head, answer.head), body[:limit]

    async def begin(self, request: bytes, body: AsyncGenerator[bytes, None] | None, silence: float) -> Head:
        """Send the head of a request, and the pieces of `body` while the answer comes; return the answer's head."""
        answer = self._ask(request, None)
        if body is not None:
            self._upload = asyncio.create_task(self._send(body))
        deadline = self._loop.time() + silence
        while answer.head is None:
            await self._wait(deadline)
        return answer.head

    async def read(self, silence: float) -> bytes:
        """Return what has come of a streamed answer's body, at least a byte; nothing at its end."""
        answer = cast(AnswerReader, self._answer)
        deadline = self._loop.time() + silence
        while not self._pieces and not answer.ended:
            await self._wait(deadline)
        data = b"".join(self._pieces)
        self._pieces.clear()
        if self._size >= _MAX_UNREAD and self._transport is not None:
            self._transport.resume_reading()
        self._size = 0
        return data

    async def finish(self) -> bool:
        """End the exchange; return whether the connection can carry another, else it is closed."""
        upload, self._upload = self._upload, None
        usable = self.release(sent=upload is None or upload.done())
        if upload is not None:
            upload.cancel()
            await asyncio.gather(upload, return_exceptions=True)
        return usable

    def release(self, *, sent: bool = True) -> bool:
        """Do as `finish` does, for a request that was `sent` in one piece."""
        answer, self._answer = self._answer, None
        taken = self._limit is not None or not self._pieces  # else reading may be paused
        self._pieces, self._size, self.fresh = [], 0, False
        transport = self._transport
        if (
            sent
            and taken
            and answer is not None
            and answer.keeps_alive
            and transport is not None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        ):
            return True
        self.abort()
        return False

    @property
    def usable(self) -> bool:
        """Whether the peer has not closed it."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def heard(self) -> bool:
        """Whether anything of the answer has come."""
        return self._answer is not None and self._answer.began

    async def refuse_tls(self) -> None:
        """Raise `Unreachable` where the peer of a connection that is `plain` speaks TLS: it has read no request."""
        if not self.plain:
            return
        address = cast(asyncio.Transport, self._transport).get_extra_info("peername")
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                _, writer = await asyncio.open_connection(*address[:2], ssl=_any_tls())
        except OSError:
            return
        writer.transport.abort()
        raise Unreachable from OSError("it speaks TLS: start its URL with https://")

    def abort(self) -> None:
        """Close it without waiting for anything."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Feed the answer that is awaited; unsolicited data closes the connection."""
        answer = self._answer
        if answer is None:
            self.abort()
            return
        try:
            piece = answer.feed(data)
        except Garbled as error:
            self._fail(error)
            return
        if piece:
            self._pieces.append(piece)
            self._size += len(piece)
            if self._limit is None:
                if self._size >= _MAX_UNREAD and self._transport is not None:
                    self._transport.pause_reading()
            elif self._size > self._limit:
                self._fail(Garbled(f"its answer is larger than {self._limit} bytes"))
        if answer.ended or self._limit is None:
            self._wake()

    def eof_received(self) -> None:
        """Treat the end of what the peer sends as the end of the connection."""
        self._end()
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake what waits on the connection."""
        del exc
        self._forget(self)
        self._writable.set()
        self._end()

    def pause_writing(self) -> None:
        """Let an upload wait until the peer has read."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let it go on."""
        self._writable.set()

    def _ask(self, request: bytes, limit: int | None, *, opaque: bool = False) -> AnswerReader:
        if not self.usable:
            raise ConnectionResetError("the connection broke")
        self._limit = limit
        answer = self._answer = AnswerReader(opaque=opaque)
        cast(asyncio.Transport, self._transport).write(request)
        return answer

    async def _send(self, body: AsyncGenerator[bytes, None]) -> None:
        """Upload the pieces of a body as the peer takes them."""
        try:
            async with aclosing(body):
                async for piece in body:
                    await self._writable.wait()
                    self._write(chunk(piece))
            self._write(chunk(b""))
        except Exception as error:  # noqa: BLE001 - raised where the answer is read
            self._fail(error)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    async def _wait(self, deadline: float) -> None:
        """Wait until something has come; raises `TimeoutError`, or what has ended the connection."""
        if self._error is not None:
            raise self._error
        waiter = self._waiting = self._loop.create_future()
        timer = self._loop.call_at(deadline, self._fail, TimeoutError("no answer in time"))
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiting = None

    def _end(self) -> None:
        """End the answer, or break it off: nothing more will come."""
        if self._answer is None or self._answer.ended or self._answer.end():
            self._wake()
        else:
            self._fail(ConnectionResetError("the connection broke"))

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """End the connection; the exchange that waits for an answer fails with `error`."""
        self._error = self._error or error
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
        self.abort()


class Pool:
    """The connections of one client to one peer, opened by `dial`; as many as there are exchanges at once.

    One that nobody needs for `idle_seconds` is closed, `IDLE_SECONDS` where those are not given.
    """

    def __init__(self, dial: Dial, *, idle_seconds: float | None = None) -> None:
        self._dial = dial
        self._idle_seconds = idle_seconds or IDLE_SECONDS
        self._open: set[Connection] = set()
        self._idle: list[Connection] = []  # the one that idles longest is the first
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweeping: asyncio.TimerHandle | None = None
        self._closed = False

    async def exchange(
        self, request: bytes, *, seconds: float, connecting: float, limit: int, repeatable: bool, cut: bool = False
    ) -> tuple[Head, bytes]:
        """Send a request and return its answer, all within `seconds`; `cut` as `Connection.exchange` has it.

        An idle connection may turn out to be closed by the peer: what is `repeatable` then goes over another one.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            connection = self._take() or await self._connect(min(seconds, connecting))
            try:
                head, body = await connection.exchange(request, deadline, limit, cut=cut)
                if head.status == HTTPStatus.BAD_REQUEST and _ASKS_FOR_TLS.search(body):
                    await connection.refuse_tls()
            except ConnectionError:
                if connection.fresh and not connection.heard:
                    await connection.refuse_tls()
                if connection.fresh or connection.heard or not repeatable:
                    raise
            else:
                return head, body
            finally:
                self._give_back(connection, usable=connection.release())

    @asynccontextmanager
    async def stream(
        self, request: bytes, body: AsyncGenerator[bytes, None] | None, *, connecting: float, silence: float
    ) -> AsyncIterator[tuple[Head, Connection]]:
        """Send a request, whose `body` may come in pieces, and yield the answer's head, and what reads its body."""
        connection = self._take() or await self._connect(connecting)
        try:
            yield await connection.begin(request, body, silence), connection
        finally:
            self._give_back(connection, usable=await connection.finish())

    async def close(self) -> None:
        """Close every connection, where their loop has not ended with them; a second call does nothing."""
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            if not self._loop.is_closed():
                raise RuntimeError("this client belongs to another event loop: close it in that loop")
            self._open.clear()
        self._closed = True
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._idle.clear()
        for connection in list(self._open):
            connection.abort()
        await asyncio.sleep(0)  # asyncio closes a transport in the loop's next turn

    def _take(self) -> Connection | None:
        if self._closed:
            raise RuntimeError("this client is closed")
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if loop is not self._loop:
            raise RuntimeError("this client belongs to another event loop: create one in this loop")
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and connection.idle_since + self._idle_seconds > loop.time():
                return connection
            connection.abort()
        return None

    async def _connect(self, seconds: float) -> Connection:
        connection = Connection(self._open.discard)
        self._open.add(connection)
        try:
            async with asyncio.timeout(seconds):
                await self._dial(connection)
        except BaseException as error:
            self._open.discard(connection)
            if isinstance(error, OSError):
                raise Unreachable from error
            raise
        return connection

    def _give_back(self, connection: Connection, *, usable: bool) -> None:
        if self._closed:
            connection.abort()
        elif usable:
            loop = asyncio.get_running_loop()
            connection.idle_since = loop.time()
            self._idle.append(connection)
            if self._sweeping is None:
                self._sweeping = loop.call_later(self._idle_seconds, self._sweep)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while self._idle and self._idle[0].idle_since + self._idle_seconds <= loop.time():
            self._idle.pop(0).abort()
        self._sweeping = loop.call_later(self._idle_seconds, self._sweep) if self._idle else None


def unix_dial(path: str) -> Dial:
    """Return what connects to the Unix socket at `path`, and waits while its backlog is full."""

    async def dial(connection: Connection) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            while not try_to_connect(sock, path):  # noqa: ASYNC110 - the kernel does not say when there is room
                await asyncio.sleep(BACKLOG_PAUSE)
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=sock)
        except BaseException:
            sock.close()
            raise

    return dial


def url_dial(url: str, tls: ssl.SSLContext | None) -> Dial:
    """Return what connects to the host that `url` names; `tls` is for an https:// one, else the system's own."""

    async def dial(connection: Connection) -> None:
        site = Site.of(url)
        context = (tls or default_tls()) if site.tls else None
        connection.plain = not site.tls
        try:
            await asyncio.get_running_loop().create_connection(lambda: connection, site.host, site.port, ssl=context)
        except ssl.SSLError as error:
            if error.reason in NOT_TLS:
                raise OSError("it does not speak TLS: start its URL with http://, or set up TLS there") from error
            raise

    return dial


def default_tls() -> ssl.SSLContext:
    """Return a context that trusts the usual authorities: the system's, or those of `SSL_CERT_FILE`.

    Raises `OSError` where that names an unusable file, which OpenSSL ignores.
    """
    return _trusting(os.environ.get("SSL_CERT_FILE"))


@cache
def _trusting(file: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if file:
        try:
            context.load_verify_locations(file)
        except OSError as error:  # also an `ssl.SSLError`
            raise OSError(f"SSL_CERT_FILE={file} is not a file of certificates in PEM: correct it") from error
    return context


@cache
def _any_tls() -> ssl.SSLContext:
    """Return a context that trusts everybody, for handshakes that nothing is sent after."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
