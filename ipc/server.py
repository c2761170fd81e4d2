"""The HTTP server behind every socket: connections, their limits, access, and the way from a request to its handler.

It is aiohttp's low-level server (`web.Server`): one literal table instead of a router, no middlewares, no signals, so
that a send costs little beside its commit. Every error leaves as problem+json; nothing a caller sends ends in a 500.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import Any, Final, cast

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_parser import RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler, RequestPayloadError

from chassis.deadlines import TimedServer
from chassis.listener import BACKLOG
from chassis.routes import Route
from ipc.answers import Answer, problem_answer, problem_of
from ipc.connection import Connection
from ipc.counters import Counters
from ipc.dispatch import MethodNotAllowed, Table
from ipc.limits import Limits
from ipc.peers import Policy
from ipc.request import Request
from ipc.tcp_guard import TcpGuard, refuse_tokens_in_query
from postroom.errors import InvalidMessage, NotPermitted, PostroomError

_log = structlog.get_logger(__name__)

_BUSY: Final = problem_of(
    429, "too_busy", "too many requests are being answered: try again", retryable=True, retry_after=1.0
)
_NOT_ALLOWED: Final = problem_of(
    403, "peer_not_allowed", "your uid may not use this socket (config: socket.allow_uids)"
)
_INTERNAL: Final = problem_of(500, "internal_error", "an error that nobody foresaw; the log has it", retryable=True)


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
        tcp_guard: TcpGuard | None = None,
    ) -> None:
        super().__init__(
            self._answer,
            deadlines=limits,
            on_drop=self._count_drop,
            request_factory=cast(Any, self._request),
            access_log=None,
            auto_decompress=False,
            tcp_keepalive=False,
            lingering_time=2.0,
            max_headers=limits.headers,
        )
        self._table = Table(routes)
        self._limits = limits
        self._connection_cap = limits.connection_cap()
        self._policy = policy
        self._counters = counters
        self._tcp_guard = tcp_guard
        self._listeners: list[asyncio.Server] = []

    async def start(self, sockets: Sequence[socket.socket]) -> None:
        """Listen on `sockets`."""
        for sock in sockets:
            sock.setblocking(False)
            self._listeners.append(await self._running_loop.create_server(self, sock=sock, backlog=BACKLOG))

    async def stop(self, grace_seconds: float) -> None:
        """Stop accepting, let the requests in hand finish for at most `grace_seconds`, and close; safe to repeat."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        await asyncio.sleep(0)  # requests that have arrived begin, so that they are waited for
        self.pre_shutdown()
        for connection in cast("list[Connection]", self.connections):
            connection.end_waiting()
        await self.shutdown(grace_seconds)

    def _count_drop(self, reason: str) -> None:
        self._counters.dropped[reason] += 1

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Count the connection; where there is no room for it, the one that has idled longest makes some."""
        super().connection_made(handler, transport)
        self._counters.connections = len(self._connections)
        if len(self._connections) > self._connection_cap:
            self._make_room(cast(Connection, handler))

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Forget the connection."""
        super().connection_lost(handler, exc)
        self._counters.connections = len(self._connections)

    def _make_room(self, newcomer: Connection) -> None:
        others = cast("list[Connection]", [each for each in self._connections if each is not newcomer])
        idle = [(since, each) for each in others if (since := each.idle_since) is not None and each.transport]
        _, victim = min(idle, key=lambda pair: pair[0], default=(0.0, newcomer))
        self._counters.dropped["too_many_connections"] += 1
        victim.abort()

    def _request(
        self,
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> Request:
        return Request(message, payload, protocol, writer, task, self._running_loop)

    async def _answer(self, request: Request) -> web.StreamResponse:
        counters = self._counters
        if counters.in_flight >= self._limits.requests_in_flight:
            return problem_answer(_BUSY, close=not request.content.is_eof())
        counters.in_flight += 1
        try:
            return await self._routed(request)
        except MethodNotAllowed as error:
            return self._refused(request, error, {"Allow": error.allow})
        except PostroomError as error:
            return self._refused(request, error)
        except RequestPayloadError as error:
            sentence = f"the body is broken: {' '.join(str(error).split())[:200]}"
            return problem_answer(problem_of(400, "bad_request", sentence), close=True)
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001 - the last net: a bug answers 500 and is logged, the process lives
            _log.exception("unforeseen_error", method=request.method, path=request.raw_path[:200])
            return problem_answer(_INTERNAL, close=True)
        finally:
            counters.in_flight -= 1

    async def _routed(self, request: Request) -> web.StreamResponse:
        route = self._table.fixed.get((request.method, request.raw_path))
        if route is None:
            refuse_tokens_in_query(request)
            route, request.params = self._table.find(request.method, request.rel_url.raw_path)
            if route.query is None and request.query_string:
                raise InvalidMessage.of(400, "invalid_query", f"{route.path} takes no query parameters")
        connection = request.connection
        if connection.is_tcp and self._tcp_guard is not None:
            self._tcp_guard.check(request)
        if not self._policy.may_call(connection.caller):
            return problem_answer(_NOT_ALLOWED, close=True)
        if route.access == "operator" and not self._policy.may_operate(connection.caller):
            raise NotPermitted.of(403, "not_an_operator", "your uid is not among the operators of this daemon")
        return await route.handler(request)

    def _refused(self, request: Request, error: PostroomError, headers: dict[str, str] | None = None) -> Answer:
        """Answer with the problem; a body that has not arrived by now is not waited for."""
        status = error.problem.status
        self._counters.answers[status] += 1
        return problem_answer(error.problem, headers, close=not request.content.is_eof())
