"""What ten open pages of the console cost a broker that accepts all it can.

One load runs all the while, and pages are opened and closed beside it. Each pair is two windows of the same length, one
with pages and one without, in turns with the one first and the other: so a disk or a database that gets slower slows
both. What would grow meanwhile, so that later windows do other work, is emptied between two pairs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Final

import aiohttp
import asyncpg
import msgspec

from bench.driver import Void
from bench.load import message
from bench.mailroom import Broker, broker, streams
from bench.processes import Meter, await_http, free_port, program
from bench.report import Measure, Results
from postroom._wire.accept import AcceptResponse
from postroom._wire.message import prepare
from postroom._wire.sql import load_queries

_QUERIES: Final = load_queries("bench", "console.sql")
_PAGES: Final = 10
_PAIRS: Final = 20
_WINDOW_SECONDS: Final = 6.0  # two looks of the console, which come every three
_SETTLE_SECONDS: Final = 0.5  # between a change and its window
_BATCH: Final = 100
_AT_ONCE: Final = 4  # as a relay posts


async def console(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Accept as fast as one broker can, with ten open overviews and without, in turns."""
    async with (
        streams(place / "nats") as (nats_url, _),
        broker(place / "broker", nats_url=nats_url) as running,
        aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser,
        _accepting(running) as load,
    ):
        url = f"http://127.0.0.1:{free_port()}"
        settings = {"POSTROOM_BROKER_URL": running.url, "POSTROOM_CONSOLE_LISTEN_PORT": url.rpartition(":")[2]}
        with program(place / "console.log", "console", environment=settings) as process:
            await_http(f"{url}/login")
            await _log_in(browser, url, running.admin)
            meter, seconds = Meter({"console": process.pid, **running.parts}), _WINDOW_SECONDS * scale
            for pair in range(max(2, round(_PAIRS * scale))):
                rates: dict[bool, float] = {}
                for with_pages in (False, True) if pair % 2 else (True, False):
                    async with _open_pages(browser, url, _PAGES if with_pages else 0):
                        await asyncio.sleep(_SETTLE_SECONDS)
                        before = meter.cpu()
                        rates[with_pages] = await load.rate(seconds)
                        used = meter.cpu()["console"] - before["console"]
                    if with_pages:
                        yield Measure("the console: CPU", 100 * used / seconds, "% of a core")
                await load.empty()
                yield Measure("without pages", rates[False], "/s")
                yield Measure("with ten pages, of without", rates[True] / rates[False], "x")


class _Load:
    """Posts that never end, and how many messages they brought; `empty` waits for those under way."""

    def __init__(self, running: Broker) -> None:
        self._running = running
        self._accepted = 0
        self._may_post = asyncio.Event()
        self._may_post.set()
        self._under_way = 0

    async def run(self, bodies: Iterator[bytes]) -> None:
        """Post for ever; raises `Void` at any other answer than that all were accepted."""
        headers = {"Authorization": f"Bearer {self._running.token}", "Content-Type": "application/json"}
        async with aiohttp.ClientSession(headers=headers) as session:
            while True:
                await self._may_post.wait()
                self._under_way += 1
                async with session.post(f"{self._running.url}/v1/accept", data=next(bodies)) as answer:
                    data = await answer.read()
                self._under_way -= 1
                statuses = {one.status for one in msgspec.json.decode(data, type=AcceptResponse).answers}
                if statuses != {201}:
                    raise Void(f"not all messages of a batch were accepted: {statuses}")
                self._accepted += _BATCH

    async def rate(self, seconds: float) -> float:
        """Return how many messages a second are accepted in so many seconds."""
        before, began = self._accepted, time.perf_counter()
        await asyncio.sleep(seconds)
        return (self._accepted - before) / (time.perf_counter() - began)

    async def empty(self) -> None:
        """Delete every message, while nothing is posted."""
        self._may_post.clear()
        while self._under_way:  # noqa: ASYNC110 - a few milliseconds
            await asyncio.sleep(0.01)
        connection = await asyncpg.connect(self._running.database_url, user="postgres")  # who may checkpoint
        await connection.execute(_QUERIES["empty"])
        await connection.execute(_QUERIES["checkpoint"])
        await connection.close()
        self._may_post.set()


@asynccontextmanager
async def _accepting(running: Broker) -> AsyncIterator[_Load]:
    load, bodies = _Load(running), _bodies()
    try:
        async with asyncio.TaskGroup() as tasks:
            posting = [tasks.create_task(load.run(bodies)) for _ in range(_AT_ONCE)]
            yield load
            for task in posting:
                task.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _bodies() -> Iterator[bytes]:
    """Yield batches; their messages differ by their ids alone, so that making them takes nothing from the broker."""
    sample = prepare(message(), idempotency_key="id")
    rest = b'","request_fingerprint":"%s","message":%s}' % (sample.fingerprint.hex().encode(), sample.payload)
    for first in count(0, _BATCH):
        items = (b'{"client_message_id":"01Jc%022d' % number + rest for number in range(first, first + _BATCH))
        yield b'{"messages":[' + b",".join(items) + b"]}"


async def _log_in(browser: aiohttp.ClientSession, url: str, token: str) -> None:
    async with browser.get(f"{url}/login") as answer:
        _, _, form_key = (await answer.text()).partition('name="form_key" value="')
    fields = {"form_key": form_key.partition('"')[0], "token": token}
    async with browser.post(f"{url}/login", data=fields, headers={"Origin": url}) as answer:
        if answer.url.path != "/":
            raise Void(f"the console lets nobody in: {answer.status}")


@asynccontextmanager
async def _open_pages(browser: aiohttp.ClientSession, url: str, pages: int) -> AsyncIterator[None]:
    """Open overviews, each with its stream, for the length of the block; raises `Void` where one says no more."""

    async def show() -> None:
        async with browser.get(f"{url}/") as answer:
            await answer.read()
        async with browser.get(f"{url}/live", timeout=aiohttp.ClientTimeout(total=None)) as answer:
            async for line in answer.content:
                if b'"trouble"' in line:
                    raise Void(f"a page says: {line.decode()}")
        raise Void("a page's stream ended")

    tasks = [asyncio.create_task(show()) for _ in range(pages)]
    yield
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
