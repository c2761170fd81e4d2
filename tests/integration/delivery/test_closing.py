"""A connection to NATS is closed soon, whatever its server does."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

from nats.errors import OutboundBufferLimitError

from embedded import EmbeddedNats
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings

MEBIBYTE = bytes(2**20)
MORE_THAN_IS_BUFFERED = 64


async def test_a_server_that_takes_nothing_more_holds_up_no_close(short_directory: Path) -> None:
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    client = await connect(NatsSettings(url=server.url), name="test", patience=20)
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        for _ in range(MORE_THAN_IS_BUFFERED):
            with suppress(OutboundBufferLimitError, TimeoutError):
                async with asyncio.timeout(0.1):
                    await client.publish("any", MEBIBYTE)
        async with asyncio.timeout(30):
            await client.close()
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
        server.stop()
    assert client.is_closed
