"""The page of a program that serves nothing else: `/health`, `/ready` and `/metrics` on a port of loopback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.routes import json_response

Reasons = Callable[[], Sequence[str]]
Metrics = Callable[[], Awaitable[bytes]]


@asynccontextmanager
async def serving_page(
    host: str, port: int | None, reasons: Reasons, metrics: Metrics, *, concerns: Reasons = tuple
) -> AsyncIterator[str | None]:
    """Serve the page and yield its URL; None, and no page, where `port` is None.

    `reasons` says what the program lacks: then `/ready` answers 503. `concerns` are in `/health` too, and keep it from
    nothing. Raises `Fatal` (69) where the port is taken.
    """
    if port is None:
        yield None
        return
    runner = web.AppRunner(_application(reasons, metrics, concerns), access_log=None, handle_signals=False)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as error:
            raise Fatal(Exit.UNAVAILABLE, f"cannot listen on {host}:{port}: {error.strerror}") from error
        bound, number = runner.addresses[0][:2]
        yield f"http://{f'[{bound}]' if ':' in bound else bound}:{number}"
    finally:
        await runner.cleanup()


def _application(reasons: Reasons, metrics: Metrics, concerns: Reasons) -> web.Application:
    async def health(request: web.Request) -> web.Response:
        found, status = list(reasons()), 200
        if request.path == "/health":
            found += concerns()
        elif found:
            status = 503
        return json_response({"status": "degraded" if found else "ok", "reasons": found}, status)

    async def scrape(_request: web.Request) -> web.Response:
        return web.Response(body=await metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_get("/ready", health)
    app.router.add_get("/metrics", scrape)
    return app
