"""A handler behind HTTP for tests: it answers as it is told, and counts what it was asked and what it did."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import msgspec
from aiohttp import web

from postroom.handler import HandlerRequest

SECONDS = 60.0


class Call(NamedTuple):
    """One request as the handler saw it."""

    request: HandlerRequest
    headers: dict[str, str]
    body: bytes

    @property
    def attempt(self) -> int:
        return int(self.headers["Postroom-Attempt"])


Answer = Callable[[Call], web.StreamResponse | Awaitable[web.StreamResponse]]


def ok(_call: Call) -> web.StreamResponse:
    return web.Response(status=200)


class CountingHandler:
    """A handler that remembers its Idempotency-Keys: `effects` counts what happened, whatever it was asked twice."""

    def __init__(self, answer: Answer = ok) -> None:
        self.answer = answer
        self.url = ""
        self.calls: list[Call] = []
        self.effects: Counter[str] = Counter()
        self.at_once: Counter[str] = Counter()
        self.most_at_once = 0
        self._news = asyncio.Condition()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        call = Call(msgspec.json.decode(body, type=HandlerRequest), dict(request.headers), body)
        key = request.headers["Idempotency-Key"]
        self.calls.append(call)
        self.at_once[key] += 1
        self.most_at_once = max(self.most_at_once, self.at_once[key])
        async with self._news:
            self._news.notify_all()
        try:
            answer = self.answer(call)
            answered = await answer if isinstance(answer, Awaitable) else answer
        finally:
            self.at_once[key] -= 1
        if answered.status < 300 and self.effects[key] == 0:
            self.effects[key] += 1
        return answered

    async def saw(self, calls: int) -> None:
        """Return when so many calls have arrived."""
        async with asyncio.timeout(SECONDS), self._news:
            await self._news.wait_for(lambda: len(self.calls) >= calls)

    def ids(self) -> list[str]:
        return [call.request.message_id for call in self.calls]


@asynccontextmanager
async def serving(answer: Answer = ok) -> AsyncIterator[CountingHandler]:
    """Run a handler on a free port, in this process."""
    handler = CountingHandler(answer)
    app = web.Application()
    app.router.add_post("/handle", handler.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    handler.url = f"http://127.0.0.1:{runner.addresses[0][1]}/handle"
    try:
        yield handler
    finally:
        await runner.cleanup()
