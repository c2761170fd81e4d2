"""Peers for the clients: a real daemon, and peers that a test makes up to misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web
from support.wire import Handler, Serve, Speak


@pytest.fixture
async def serve(short_directory: Path) -> AsyncIterator[Serve]:
    """Answer every request on a socket with one handler."""
    async with AsyncExitStack() as closing:

        async def start(handler: Handler) -> Path:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handler)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            closing.push_async_callback(runner.cleanup)
            path = short_directory / "peer.sock"
            await web.UnixSite(runner, str(path)).start()
            return path

        yield start


@pytest.fixture
async def speak(short_directory: Path) -> AsyncIterator[Speak]:
    """Say the same bytes to whoever connects and asks, and hang up."""
    async with AsyncExitStack() as closing:

        async def start(answer: bytes) -> Path:
            async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(answer)
                await writer.drain()
                writer.close()

            path = short_directory / "peer.sock"
            server = await asyncio.start_unix_server(talk, path)
            closing.callback(server.close)
            return path

        yield start
