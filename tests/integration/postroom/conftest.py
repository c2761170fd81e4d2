"""Peers for the clients: a real daemon, and peers that a test makes up to misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web
from support.wire import Conversation, Handler, Serve, Speak, Talk


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
async def talk(short_directory: Path) -> AsyncIterator[Talk]:
    """Do to every connection what a test likes, and hang up once that is done."""
    async with AsyncExitStack() as closing:

        async def start(conversation: Conversation) -> Path:
            talking: set[asyncio.Task[Any]] = set()

            async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                talking.add(cast(asyncio.Task[Any], asyncio.current_task()))
                try:
                    await conversation(reader, writer)
                except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                    pass
                finally:
                    writer.close()

            async def hang_up() -> None:
                for task in talking:
                    task.cancel()
                await asyncio.gather(*talking)
                await asyncio.sleep(0)

            closing.push_async_callback(hang_up)
            path = short_directory / "peer.sock"
            server = await asyncio.start_unix_server(hold, path)
            closing.callback(server.close)
            return path

        yield start


@pytest.fixture
def speak(talk: Talk) -> Speak:
    """Say the same bytes to whoever connects and asks, and hang up."""

    async def start(answer: bytes) -> Path:
        async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            await writer.drain()

        return await talk(say)

    return start
