"""The broker's HTTP server: where it listens, with or without TLS, and how it stops."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from broker.app import Services, build
from broker.config import BrokerConfig
from chassis.exits import Exit, Fatal

_SHUTDOWN_SECONDS: Final = 20.0  # how long the batches at work may take to finish
_IDLE_SECONDS: Final = 75.0  # how long an idle connection is kept


@asynccontextmanager
async def serving(services: Services) -> AsyncIterator[str]:
    """Listen, and yield the URL; at the end finish the requests at work.

    Raises `Fatal`: 69 where the address is taken, 78 where certificate and key are no pair.
    """
    config = services.config
    runner = web.AppRunner(
        build(services),
        access_log=None,
        handle_signals=False,
        auto_decompress=False,
        keepalive_timeout=_IDLE_SECONDS,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    await runner.setup()
    try:
        try:
            await _site(runner, config).start()
        except OSError as error:
            raise Fatal(Exit.UNAVAILABLE, f"cannot listen on {_where(config)}: {error.strerror}") from error
        yield _url(runner, config)
    finally:
        await runner.cleanup()


def _site(runner: web.AppRunner, config: BrokerConfig) -> web.BaseSite:
    tls = None
    if config.tls_cert is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            tls.load_cert_chain(config.tls_cert, config.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise Fatal(Exit.CONFIG, f"cannot load tls_cert {config.tls_cert} with tls_key: {error}") from error
    if config.socket_path is not None:
        return web.UnixSite(runner, str(config.socket_path), ssl_context=tls)
    return web.TCPSite(runner, config.listen_host, config.listen_port, ssl_context=tls)


def _url(runner: web.AppRunner, config: BrokerConfig) -> str:
    if config.socket_path is not None:
        return f"unix://{config.socket_path}"
    scheme = "http" if config.tls_cert is None else "https"
    host, port = runner.addresses[0][:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _where(config: BrokerConfig) -> str:
    return str(config.socket_path or f"{config.listen_host}:{config.listen_port}")
