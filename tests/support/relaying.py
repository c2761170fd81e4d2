"""What the tests of the relay share: ids, what a broker says of itself and answers, the rows of the outbox."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from outbox import RowFilter

FEATURES = {
    "mesh": "demo",
    "member": "alice",
    "max_batch": 1000,
    "client_message_id_dedupe": {
        "version": 1,
        "mode": "retention_scoped",
        "request_fingerprint": True,
        "dedupe_retention_days": 30,
    },
}


def ids_of(count: int) -> list[str]:
    return [f"id-{n:04}" for n in range(count)]


def whole(status: int, **headers: str) -> web.Response:
    """Answer the whole request."""
    return web.json_response({"code": "why_not", "detail": "because"}, status=status, headers=headers)


def busy(status: int = 503) -> web.Response:
    """Answer as a broker does that has as much at work as it takes."""
    body = {"code": "overloaded" if status == HTTPStatus.SERVICE_UNAVAILABLE else "rate_limited", "detail": "later"}
    return web.json_response(body, status=status, headers={"Retry-After": "1"})


async def rows_of(here) -> list:
    return [row async for page in here.outbox.pages(RowFilter()) for row in page.rows]
