"""The broker's HTTP server: where it listens, with or without TLS, and how it stops."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from broker.app import Services, build
from broker.config import BrokerConfig
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.listener import TimedConnection, TimedServer, listening, remove, running, unix_listener

_SHUTDOWN_SECONDS: Final = 20.0  # how long the batches at work may take to finish
_DESCRIPTORS_KEPT: Final = 64  # for Postgres, Redis, webhooks' names and whatever else the process opens
_LOOKED_AT: Final = 100  # connections at most, to find one that is idle


@asynccontextmanager
async def serving(services: Services) -> AsyncIterator[str]:
    """Listen, and yield the URL; at the end finish the requests at work.

    Raises `Fatal`: 69 where the address is taken or a process answers on the socket, 78 where certificate and key are
    no pair, or the socket cannot be created.
    """
    config = services.config
    tls = _tls(config)
    async with AsyncExitStack() as stack:
        runner = await stack.enter_async_context(
            running(build(services), lambda app: timed_server(app, services), _SHUTDOWN_SECONDS)
        )
        if config.socket_path is None:
            yield await listening(runner, config.listen_host, config.listen_port, tls)
        else:
            sock = stack.enter_context(_unix_socket(config.socket_path, config.socket_group))
            await web.SockSite(runner, sock, ssl_context=tls).start()
            yield f"unix://{config.socket_path}"


class CrowdedServer(TimedServer):
    """A server that takes no more connections than it may: one that nobody uses makes room for a newcomer."""

    def __init__(self, handler: Any, *, most: int, on_drop: Callable[[str], None], **options: Any) -> None:
        super().__init__(handler, on_drop=on_drop, **options)
        self._most = most
        self._crowd: OrderedDict[TimedConnection, None] = OrderedDict()  # those that wait longest to be looked at first

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Let the newcomer in; where there are too many, and none of the next few is idle, it has to go itself."""
        super().connection_made(handler, transport)
        newcomer = cast(TimedConnection, handler)
        if len(self._crowd) >= self._most:
            looked_at = list(islice(self._crowd, _LOOKED_AT))
            idle = next((each for each in looked_at if each.idle_since is not None), newcomer)
            for each in looked_at:
                self._crowd.move_to_end(each)
            self._crowd.pop(idle, None)
            self._on_drop("too_many_connections")
            idle.abort()
        self._crowd[newcomer] = None

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Forget the connection."""
        super().connection_lost(handler, exc)
        self._crowd.pop(cast(TimedConnection, handler), None)


def timed_server(app: web.AppRunner, services: Services) -> CrowdedServer:
    """Return a server with deadlines for the application that `app` has set up; aiohttp's own has none."""
    inner = cast(web.Server, app.server)
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors
    return CrowdedServer(
        inner.request_handler,
        most=max(1, min(services.config.max_connections, descriptors - _DESCRIPTORS_KEPT)),
        deadlines=services.config,
        on_drop=lambda reason: services.metrics.dropped.labels(reason).inc(),
        request_factory=inner.request_factory,
        access_log=None,
        auto_decompress=False,
    )


@contextmanager
def _unix_socket(path: Path, group: str | None) -> Iterator[socket.socket]:
    """Listen on `path`, and take its file away at the end."""
    sock = unix_listener(path, group)
    inode = path.lstat().st_ino
    sock.setblocking(False)
    try:
        yield sock
    finally:
        remove(path, inode)


def _tls(config: BrokerConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        return None
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        tls.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise Fatal(
            Exit.CONFIG, f"cannot load tls_cert {config.tls_cert} with tls_key: {error}; check both files"
        ) from error
    return tls
