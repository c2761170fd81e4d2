"""The broker's HTTP server: where it listens, with or without TLS, and how it stops."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, cast

from aiohttp import web

from broker.app import Services, build
from broker.config import BrokerConfig
from chassis.deadlines import TimedServer
from chassis.exits import Exit, Fatal
from chassis.listener import remove, unix_listener

_SHUTDOWN_SECONDS: Final = 20.0  # how long the batches at work may take to finish


@asynccontextmanager
async def serving(services: Services) -> AsyncIterator[str]:
    """Listen, and yield the URL; at the end finish the requests at work.

    Raises `Fatal`: 69 where the address is taken or a process answers on the socket, 78 where certificate and key are
    no pair, or the socket cannot be created.
    """
    config = services.config
    tls = _tls(config)
    async with AsyncExitStack() as stack:
        runner = await stack.enter_async_context(_running(services))
        if config.socket_path is None:
            yield await _listen_on_tcp(runner, config, tls)
        else:
            sock = stack.enter_context(_unix_socket(config.socket_path, config.socket_group))
            await web.SockSite(runner, sock, ssl_context=tls).start()
            yield f"unix://{config.socket_path}"


@asynccontextmanager
async def _running(services: Services) -> AsyncIterator[web.ServerRunner]:
    """Run the application on a server that drops the connections of clients that are too slow."""
    app = web.AppRunner(build(services), handle_signals=False)
    await app.setup()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(app.cleanup)
        server = timed_server(app, services)
        runner = web.ServerRunner(server, shutdown_timeout=_SHUTDOWN_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        sweep = asyncio.create_task(server.sweep())
        stack.callback(sweep.cancel)
        yield runner


def timed_server(app: web.AppRunner, services: Services) -> TimedServer:
    """Return a server with deadlines for the application that `app` has set up; aiohttp's own has none."""
    inner = cast(web.Server, app.server)
    return TimedServer(
        inner.request_handler,
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


async def _listen_on_tcp(runner: web.ServerRunner, config: BrokerConfig, tls: ssl.SSLContext | None) -> str:
    try:
        await web.TCPSite(runner, config.listen_host, config.listen_port, ssl_context=tls).start()
    except OSError as error:
        where = f"{config.listen_host}:{config.listen_port}"
        raise Fatal(Exit.UNAVAILABLE, f"cannot listen on {where}: {error.strerror}") from error
    host, port = runner.addresses[0][:2]
    return f"{'http' if tls is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"


def _tls(config: BrokerConfig) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        return None
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        tls.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise Fatal(Exit.CONFIG, f"cannot load tls_cert {config.tls_cert} with tls_key: {error}") from error
    return tls
