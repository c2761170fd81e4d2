"""What protects the loopback TCP port from other users and from web pages (docs/contract/send.md#send-6).

Every request needs the local token; its `Host` must name this machine, and no header may say that a page of another
origin sent it. A token in a query string ends up in logs and histories: it is refused on every socket.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import structlog
from aiohttp import hdrs

from ipc.request import Request
from ipc.tokens import LocalToken
from postroom.errors import InvalidMessage, NotPermitted

_log = structlog.get_logger(__name__)

_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_TOKEN_PARAMETERS: Final = frozenset({"token", "access_token", "auth", "authorization", "api_key", "bearer"})
_OWN_SITES: Final = frozenset({"same-origin", "none"})


class TcpGuard:
    """Checks every request that came over TCP, before its handler sees it."""

    def __init__(self, token: LocalToken) -> None:
        self._token = token

    def check(self, request: Request) -> None:
        """Raise `InvalidMessage` (400) or `NotPermitted` (401, 403) for a request that may not come in."""
        _check_host(request)
        _check_origin(request)
        scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() != "bearer" or not self._token.matches(token.strip()):
            _log.warning("local_token_refused", path=request.path[:200])
            raise NotPermitted.of("unauthorized", "a request over TCP needs Authorization: Bearer <local token>")


def refuse_tokens_in_query(request: Request) -> None:
    """Raise `InvalidMessage` (400), and log, where the query string carries a token."""
    if _TOKEN_PARAMETERS.isdisjoint(name.lower() for name in request.query):
        return
    _log.warning("token_in_query", path=request.path[:200], caller=str(request.caller))
    detail = "a token in the query string ends up in logs: send Authorization: Bearer, and rotate this one"
    raise InvalidMessage.of("token_in_query", detail)


def _check_host(request: Request) -> None:
    hosts = request.headers.getall(hdrs.HOST, [])
    if len(hosts) != 1 or _host_name(f"//{hosts[0]}") not in _LOCAL_HOSTS:
        raise NotPermitted.of("foreign_host", "the Host must be localhost, 127.0.0.1 or [::1]")


def _check_origin(request: Request) -> None:
    headers = request.headers
    sources = [value for name in (hdrs.ORIGIN, hdrs.REFERER) for value in headers.getall(name, [])]
    foreign_site = headers.get("Sec-Fetch-Site", "none").lower() not in _OWN_SITES
    if foreign_site or any(_host_name(source) not in _LOCAL_HOSTS for source in sources):
        raise NotPermitted.of("foreign_origin", "a page of another origin may not use this socket")


def _host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
