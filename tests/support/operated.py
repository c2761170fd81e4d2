"""A broker in a thread of the test's process, for tests that run commands of an operator against it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from broker.app import build
from broker.config import BrokerConfig
from broker.server import open_services
from postroom.delivery.settings import NatsSettings

ADMIN_TOKEN = "an administrator's token for tests"


@contextmanager
def operated_broker(directory: Path, database: str, nats: NatsSettings | None = None) -> Iterator[dict[str, str]]:
    """Run a broker for the length of the block; yields the variables by which an administrator reaches it."""
    token_file = directory / "admin.token"
    token_file.write_text(ADMIN_TOKEN)
    token_file.chmod(0o600)
    config = BrokerConfig(database_url=database, admin_token_file=token_file, nats=nats)
    listening = asyncio.Queue[str]()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with open_services(config) as services:
            runner = web.AppRunner(build(services), access_log=None, auto_decompress=False)
            await runner.setup()
            try:
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                await listening.put("http://{}:{}".format(*runner.addresses[0][:2]))
                await asyncio.Event().wait()
            finally:
                await runner.cleanup()

    serving = loop.create_task(serve())
    serving.add_done_callback(lambda _: loop.stop())
    thread = threading.Thread(target=loop.run_forever, name="operated-broker")
    thread.start()
    try:
        url = asyncio.run_coroutine_threadsafe(listening.get(), loop).result(30)
        yield {"POSTROOM_BROKER_URL": url, "POSTROOM_ADMIN_TOKEN_FILE": str(token_file)}
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
        loop.close()
