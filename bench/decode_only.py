"""A baseline: an aiohttp server on a Unix socket that only decodes a send and says 202. It keeps nothing."""

from __future__ import annotations

import sys

import msgspec
from aiohttp import web

from postroom._wire.message import SendRequest

_decode = msgspec.json.Decoder(SendRequest).decode


async def decode(request: web.Request) -> web.Response:
    """Decode the body with msgspec and answer as the daemon would."""
    _decode(await request.read())
    return web.Response(status=202, body=b'{"status":"queued"}', content_type="application/json")


def main() -> None:
    """Serve on the socket named by the first argument."""
    app = web.Application()
    app.router.add_post("/v1/send", decode)
    web.run_app(app, path=sys.argv[1], backlog=1024, access_log=None, print=None)


if __name__ == "__main__":
    main()
