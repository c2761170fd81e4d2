"""A handler behind HTTP that does nothing but note when each message came; a process of its own.

`GET /calls` tells how many came, and when the first and the last did; `GET /times` tells it of each. Times are in
seconds since the epoch.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Final

from aiohttp import web

_times: Final[dict[str, float]] = {}


async def handle(request: web.Request) -> web.Response:
    """Take one message."""
    await request.read()
    _times.setdefault(request.headers["Idempotency-Key"], time.time())
    return web.Response()


async def calls(_request: web.Request) -> web.Response:
    """Tell how many messages came, and when the first and the last."""
    first, last = (next(iter(_times.values())), next(reversed(_times.values()))) if _times else (0.0, 0.0)
    return web.json_response({"count": len(_times), "first": first, "last": last})


async def times(_request: web.Request) -> web.Response:
    """Tell when each message came, by its id."""
    return web.Response(text=json.dumps(_times), content_type="application/json")


def main() -> None:
    """Serve on the port of loopback that the first argument names."""
    app = web.Application()
    app.router.add_post("/handle", handle)
    app.router.add_get("/calls", calls)
    app.router.add_get("/times", times)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), access_log=None, print=None)


if __name__ == "__main__":
    main()
