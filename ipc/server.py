"""The HTTP server behind every socket: connections, their limits, access, and the dispatch of requests.

It is aiohttp's low-level server (`web.Server`): one literal table instead of a router, no middlewares, no signals, so
that a send costs little compared to its commit; a plain send bypasses aiohttp (ipc/connection.py), but comes through
here like all others. No uid can keep the others out (docs/contract/send.md#send-98).
"""

import asyncio
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple, cast
from urllib.parse import unquote

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from ipc.connection import Answer, Connection, PlainSend, Request, expects_more, problem_answer, problem_of
from ipc.peers import Policy, TcpGuard, peer_of, refuse_tokens_in_query
from ipc.services import Counters
from ipc.shares import REQUEST, REST, Budget, Limits, Turns
from postroom.chassis.listener import TOO_MUCH_UNREAD, Deadlines, TimedConnection, TimedServer
from postroom.chassis.routes import (
    BROKEN_BODY,
    INTERNAL_ERROR,
    Route,
    refuse_request_line,
    refuse_what_is_not_taken,
    wrong_method,
)
from postroom.errors import NotFound, NotPermitted, PostroomError, TryAgain

_log = structlog.get_logger(__name__)

_ACCEPTED_A_TURN: Final = 4  # connections
_TURNED_AWAY_A_TURN: Final = 64  # connections of a uid that has too many
_EXAMINED: Final = 8  # connections that count as idle but may still write their answer
_MAX_SEGMENT: Final = 512  # characters of one variable part of a path
_PAUSE: Final = 0.1  # seconds without accepting, where the process has no descriptor left
_NOT_ALLOWED: Final = problem_of(
    403, "peer_not_allowed", "your uid may not use this socket (config: socket.allow_uids)"
)


class Server(TimedServer):
    """Serves the routes on any number of sockets, from `start` to `stop`."""

    connection_type = Connection

    def __init__(
        self,
        routes: Sequence[Route],
        *,
        limits: Limits,
        policy: Policy,
        counters: Counters,
        memory: Budget,
        tcp_guard: TcpGuard | None = None,
    ) -> None:
        super().__init__(
            self._answer,
            deadlines=Deadlines(limits.header_seconds, limits.body_seconds, limits.stall_seconds, limits.idle_seconds),
            on_drop=self._count_drop,
            request_factory=lambda head, body, handler, writer, task: Request(
                head, body, handler, writer, task, self._running_loop
            ),
            access_log=None,
            auto_decompress=False,
            tcp_keepalive=False,
            lingering_time=2.0,
            max_headers=limits.headers,
        )
        self._table = Table(routes)
        self._open = OpenConnections(limits.connection_cap())
        self.requests = Budget(limits.requests_in_flight, "too many requests are being answered: try again")
        self.turns = Turns()
        self._memory = memory
        self._unread: dict[TimedConnection, int] = {}  # bytes of it
        self._policy = policy
        self._counters = counters
        self._tcp_guard = tcp_guard
        self._listeners: list[socket.socket] = []
        self._arriving: set[asyncio.Task[Any]] = set()

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Accept on `sockets`, which listen."""
        for sock in sockets:
            sock.setblocking(False)
            self._listeners.append(sock)
            self._running_loop.add_reader(sock, self._accept, sock)

    async def stop(self, grace_seconds: float) -> None:
        """Stop accepting, let running requests finish within `grace_seconds`, and close; safe to repeat."""
        for listener in self._listeners:
            self._running_loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()
        await asyncio.sleep(0)  # requests that have arrived begin, so that they are waited for
        self.pre_shutdown()
        for connection in cast("list[Connection]", self.connections):
            connection.end_waiting()
        await self.shutdown(grace_seconds)

    def _count_drop(self, reason: str) -> None:
        self._counters.dropped[reason] += 1

    def _accept(self, listener: socket.socket) -> None:
        """Accept some of the waiting connections; once the server is full, not those of a uid that has had its turn."""
        accepted = 0
        for _ in range(_TURNED_AWAY_A_TURN):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left: the connections wait, none is refused
                _log.warning("cannot_accept", error=error.strerror)
                self._rest(listener, _PAUSE)
                return
            if self._open.is_full and not self._may_come(sock):
                self._count_drop("too_many_connections")
                sock.close()
                continue
            sock.setblocking(False)
            arriving = self._running_loop.create_task(self._take_in(sock))
            self._arriving.add(arriving)
            arriving.add_done_callback(self._arriving.discard)
            if (accepted := accepted + 1) == _ACCEPTED_A_TURN:
                if not self.turns.alone:
                    self._rest(listener, REST)
                return

    def _rest(self, listener: socket.socket, seconds: float) -> None:
        """Accept no connection for a while, so that other work has its turn."""
        self._running_loop.remove_reader(listener)
        self._running_loop.call_later(seconds, self._accept_again, listener)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self._running_loop.add_reader(listener, self._accept, listener)

    def _may_come(self, sock: socket.socket) -> bool:
        with suppress(OSError):
            return self.turns.may_have(peer_of(sock).uid, REQUEST)
        return False

    async def _take_in(self, sock: socket.socket) -> None:
        with suppress(OSError):  # it has disconnected already
            await self._running_loop.connect_accepted_socket(self, sock)

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Count the connection; where there is no room for it, drop one of the uid with the most."""
        super().connection_made(handler, transport)
        newcomer = cast(Connection, handler)
        newcomer.requests, newcomer.turns = self.requests, self.turns
        newcomer.is_allowed = self._policy.may_call(newcomer.caller)
        surplus = self._open.enter(newcomer)
        self._counters.connections = self._open.count
        if surplus is not None:
            self._count_drop("too_many_connections")
            surplus.abort()

    def hold_unread(self, connection: TimedConnection, size: int) -> None:
        """Count what a caller does not read towards its share of memory, or drop it where that is used up."""
        try:
            self._memory.take(size, cast(Connection, connection).caller.uid)
        except TryAgain:
            self._count_drop(TOO_MUCH_UNREAD)
            connection.abort()
        else:
            self._unread[connection] = size

    def release_unread(self, connection: TimedConnection) -> None:
        """Give it back."""
        if size := self._unread.pop(connection, 0):
            self._memory.give_back(size, cast(Connection, connection).caller.uid)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Forget the connection."""
        super().connection_lost(handler, exc)
        self._open.leave(cast(Connection, handler))
        self._counters.connections = self._open.count

    async def _answer(self, request: Request | PlainSend) -> web.StreamResponse:
        connection = request.connection
        uid = connection.caller.uid
        self._open.begins(connection)
        try:
            if not self.turns.may_have(uid, self.turns.request):
                await self.turns.line_up(uid, self.turns.request)
            self.requests.take(1, uid)
            request.keeps_others_out = True
            self._counters.in_flight += 1
            try:
                return await self._routed(request, connection)
            finally:
                self._counters.in_flight -= 1
                request.only_waits()
        except MethodNotAllowed as error:
            return self._refused(request, error, {"Allow": error.allow})
        except PostroomError as error:
            return self._refused(request, error)
        except RequestPayloadError:
            return problem_answer(BROKEN_BODY, close=True)
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001 - the last net: a bug answers 500 and is logged, the process lives
            _log.exception("unforeseen_error", method=request.method, path=request.path[:200])
            return problem_answer(INTERNAL_ERROR, close=True)
        finally:
            self._open.ends(connection)

    async def _routed(self, request: Request | PlainSend, connection: Connection) -> web.StreamResponse:
        if isinstance(request, Request):
            refuse_request_line(request)
        if isinstance(request, PlainSend):
            route, _ = self._table.find(request.method, request.path)  # not every port has this route
        elif (fixed := self._table.fixed.get((request.method, request.raw_path))) is not None:
            route = fixed
        else:
            refuse_tokens_in_query(request, connection.caller)
            route, request.params = self._table.find(request.method, request.rel_url.raw_path)
        if connection.is_tcp and self._tcp_guard is not None and isinstance(request, Request):
            self._tcp_guard.check(request)
            request.check_again = partial(self._tcp_guard.check_token, request)
        if not connection.is_allowed:
            return problem_answer(_NOT_ALLOWED, close=True)
        if route.access == "operator" and not self._policy.may_operate(connection.caller):
            raise NotPermitted.of(
                "not_an_operator",
                "your uid is not among the operators of this daemon: add it to its config, or use sudo",
            )
        if isinstance(request, Request):
            refuse_what_is_not_taken(request, route)
            expects_more(request)
        return await route.handler(request)

    def _refused(
        self, request: Request | PlainSend, error: PostroomError, headers: dict[str, str] | None = None
    ) -> Answer:
        """Answer with the problem, without waiting for a body that has not arrived yet."""
        status = error.problem.status
        self._counters.answers[status] += 1
        return problem_answer(error.problem, headers, close=not request.has_arrived)


class Found(NamedTuple):
    """A route, and the variable parts of the path that led to it."""

    route: Route
    params: dict[str, str]


class Table:
    """The routes, indexed: fixed paths by a dictionary, variable ones by their segments, whose ids may be any word.

    A target is matched as it was sent, and not normalised: `/v1/%73end`, `//v1/send` and `/v1/../v1/send` are other
    paths, and 404. The variable parts of a match are decoded: `a%3Ab` is the id `a:b`.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        self.fixed: Final[dict[tuple[str, str], Route]] = {}
        self._variable: Final[defaultdict[int, list[tuple[list[str], Route]]]] = defaultdict(list)
        for route in routes:
            if "{" in route.path:
                segments = route.path.split("/")
                self._variable[len(segments)].append((segments, route))
            else:
                self.fixed.update(((method, route.path), route) for method in route.methods)

    def find(self, method: str, path: str) -> Found:
        """Return the route; raises `NotFound`, or a 405 where the path takes other methods."""
        if route := self.fixed.get((method, path)):
            return Found(route, {})
        candidates = [Found(route, {}) for (_, known), route in self.fixed.items() if known == path]
        parts = path.split("/")
        for segments, route in self._variable.get(len(parts), ()):
            if (params := _match(segments, parts)) is not None:
                candidates.append(Found(route, params))
        for found in candidates:
            if method in found.route.methods:
                return found
        if candidates:
            raise MethodNotAllowed(method for found in candidates for method in found.route.methods)
        raise NotFound.of("no_such_route", "there is no such route: read GET /v1/openapi.json, which lists them all")


class MethodNotAllowed(PostroomError):
    """The path exists for other methods (405), which `allow` lists."""

    def __init__(self, methods: Iterable[str]) -> None:
        accepted = set(methods)
        self.allow = ", ".join(sorted(accepted))
        super().__init__(wrong_method(accepted))


def _match(segments: list[str], parts: list[str]) -> dict[str, str] | None:
    params = {}
    for segment, part in zip(segments, parts, strict=True):
        if segment.startswith("{"):
            if not part or len(part) > _MAX_SEGMENT:
                return None
            params[segment[1:-1]] = unquote(part)
        elif segment != part:
            return None
    return params


Row = dict[Connection, None]  # in the order in which they joined it


class OpenConnections:
    """The open connections by uid, at most `cap` of them: beyond that a new one replaces another.

    The uid with the most connections loses one, the one that has idled longest; where none of them idles, and the new
    one is another uid's, the one that has been busy longest. Making room looks at each uid, every other step at one.
    """

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.count = 0
        self._idle: defaultdict[int, Row] = defaultdict(dict)
        self._busy: defaultdict[int, Row] = defaultdict(dict)
        self._sizes: dict[int, int] = {}  # connections by uid, those of the latest change last

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another one."""
        return self.count >= self.cap

    def enter(self, newcomer: Connection) -> Connection | None:
        """Count a connection, which idles; returns the one that has to be dropped, if there are too many.

        That one is forgotten at once: it is closed only in a later turn of the loop, and the next needs another.
        """
        uid = newcomer.caller.uid
        self._idle[uid][newcomer] = None
        self._resize(uid, 1)
        if self.count <= self.cap:
            return None
        greediest = max(self._sizes, key=self._sizes.__getitem__)
        idle, busy = self._idle[greediest], self._busy[greediest]
        surplus = newcomer if greediest == uid or not busy else next(iter(busy))
        for guest in list(islice(idle, _EXAMINED)):
            if guest is not newcomer and guest.idle_since is not None:
                surplus = guest
                break
            idle[guest] = idle.pop(guest)  # to the end of the row
        self.leave(surplus)
        return surplus

    def leave(self, guest: Connection) -> None:
        """Forget a connection; a second call does nothing."""
        uid = guest.caller.uid
        for rows in (self._idle, self._busy):
            if guest in rows.get(uid, ()):
                del rows[uid][guest]
                if not rows[uid]:
                    del rows[uid]
                self._resize(uid, -1)

    def begins(self, guest: Connection) -> None:
        """Note that a request of this connection is being answered."""
        uid = guest.caller.uid
        if guest in self._idle.get(uid, ()):
            del self._idle[uid][guest]
            self._busy[uid][guest] = None

    def ends(self, guest: Connection) -> None:
        """Note that no request of this connection is being answered."""
        uid = guest.caller.uid
        if guest in self._busy.get(uid, ()):
            del self._busy[uid][guest]
            self._idle[uid][guest] = None

    def _resize(self, uid: int, by: int) -> None:
        self.count += by
        if size := self._sizes.pop(uid, 0) + by:
            self._sizes[uid] = size
