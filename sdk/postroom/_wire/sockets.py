"""Connections of a client without an event loop: blocking sockets to a daemon, one exchange at a time on each.

The same as `connections.py`, in threads, with the same promises and errors. `exchange` is a coroutine function so that
one transport serves both, but it never waits for a loop.
"""

import math
import select
import socket
import time
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, Final, TypeVar, cast

from postroom._wire.http import AnswerReader, Garbled, Head, Unreachable

IDLE_SECONDS: Final = 15.0  # after which a connection that nobody needs is closed
BACKLOG_PAUSE: Final = 0.01  # seconds until a daemon that has no room for another connection is asked again
_LONGEST_POLL: Final = 2_000_000.0  # seconds, some three weeks: poll(2) takes no more ms than an int has
_RECEIVED_AT_ONCE: Final = 64 * 1024  # bytes

_R = TypeVar("_R")


def run_to_end(work: Coroutine[Any, Any, _R]) -> _R:
    """Run a coroutine that never waits for a loop."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise RuntimeError("what runs without a loop has waited for one")


class BlockingConnection:
    """One connection to the Unix socket at `path`, opened by `deadline` (`time.monotonic`); `fresh` at first."""

    def __init__(self, path: str, deadline: float) -> None:
        self.fresh = True
        self.heard = False
        self.idle_since = 0.0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            while not try_to_connect(self._socket, path):
                if time.monotonic() >= deadline:
                    raise TimeoutError("no room for a connection")  # noqa: TRY301 - the socket is closed like that
                time.sleep(BACKLOG_PAUSE)
        except BaseException:
            self._socket.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)

    def exchange(self, request: bytes, deadline: float, limit: int) -> tuple[Head, bytes]:
        """Send a request and return its answer, of at most `limit` bytes; then the connection can carry another.

        An answer that comes before the whole request is sent is valid, but the connection is not used again.
        """
        answer, unsent, body = AnswerReader(), memoryview(request), bytearray()
        self.heard = usable = False
        try:
            while not answer.ended:
                if unsent:
                    unsent = unsent[self._send(unsent) :]
                self._poll.modify(self._socket, select.POLLIN | select.POLLOUT if unsent else select.POLLIN)
                seconds = min(max(0.0, deadline - time.monotonic()), _LONGEST_POLL)
                if not self._poll.poll(math.ceil(seconds * 1000)):
                    raise TimeoutError("no answer in time")
                try:
                    data = self._socket.recv(_RECEIVED_AT_ONCE)
                except BlockingIOError:
                    continue
                if not data:
                    if answer.end():
                        break
                    raise ConnectionResetError("the connection broke")
                self.heard = True
                body += answer.feed(data)
                if len(body) > limit:
                    raise Garbled(f"its answer is larger than {limit} bytes")
            usable = answer.keeps_alive and not unsent
        finally:
            self.fresh = False
            if not usable:
                self.close()
        return cast(Head, answer.head), bytes(body)

    @property
    def usable(self) -> bool:
        """Whether another request can go over it: it is open, and no unsolicited data has come."""
        return self._socket.fileno() >= 0 and not self._poll.poll(0)

    def close(self) -> None:
        """Close it; a second call does nothing."""
        self._socket.close()

    def _send(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except ConnectionError:
            return len(data)  # the daemon takes no more; what it sent before that can still be read


class BlockingPool:
    """The connections of one client to the daemon at `path`; may be used by many threads at once."""

    def __init__(self, path: str) -> None:
        self._path = path
        # The one that idles longest is the first. No lock: a signal handler or a destructor may send amid a send.
        self._idle = deque[BlockingConnection]()
        self._closed = False

    async def exchange(
        self, request: bytes, *, seconds: float, connecting: float, limit: int, repeatable: bool
    ) -> tuple[Head, bytes]:
        """Send a request and return its answer, all within `seconds`; see `Pool.exchange`."""
        now = time.monotonic()
        while True:
            try:
                connection = self._take() or BlockingConnection(self._path, now + min(seconds, connecting))
            except TimeoutError:
                raise
            except OSError as error:
                raise Unreachable from error
            fresh = connection.fresh
            try:
                answer = connection.exchange(request, now + seconds, limit)
            except ConnectionError:
                if fresh or connection.heard or not repeatable:
                    raise
            else:
                connection.idle_since = now = time.monotonic()
                self._idle.append(connection)  # for the next exchange
                with suppress(IndexError):  # none idles any more
                    # close those that nobody needed for a while, or another one where one is taken meanwhile
                    while self._closed or self._idle[0].idle_since + IDLE_SECONDS < now:
                        self._idle.popleft().close()
                return answer

    async def close(self) -> None:
        """Close every connection that idles, and the others when they do; a second call does nothing."""
        self._closed = True
        with suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _take(self) -> BlockingConnection | None:
        with suppress(IndexError):  # none idles
            while not (connection := self._idle.pop()).usable:
                connection.close()
            return connection
        return None


def try_to_connect(sock: socket.socket, path: str) -> bool:
    """Connect a Unix socket that does not block; False where the peer's backlog is full just now."""
    try:
        sock.connect(path)
    except BlockingIOError:
        return False
    return True
