"""Logging in with a token, and out."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

from aiohttp import web

from console.sessions import SESSION
from console.views import HOME, SESSIONS, page, set_cookie
from postroom.errors import PostroomError

_OWN_PATH: Final = re.compile(r"/(?![/\\])[!-~]*")


async def show_login(request: web.Request) -> web.Response:
    """`GET /login?next=`."""
    if SESSION in request:
        raise web.HTTPSeeOther(_next(request))
    return page(request, "login.html", sentence=None, next=_next(request))


async def log_in(request: web.Request) -> web.Response:
    """`POST /login`: the token goes to the broker, and stays in the memory of this process."""
    token = (await request.post()).get("token")
    try:
        session = await request.app[SESSIONS].begin(
            token.strip() if isinstance(token, str) else "", request.remote or ""
        )
    except PostroomError as error:
        answer = page(request, "login.html", status=error.problem.status, sentence=str(error), next=_next(request))
        if error.problem.retry_after is not None:
            answer.headers["Retry-After"] = f"{error.problem.retry_after:.0f}"
        return answer
    if SESSION in request:
        await request.app[SESSIONS].end(request[SESSION].key)
    answer = web.Response(status=HTTPStatus.SEE_OTHER, headers={"Location": _next(request)})
    set_cookie(request, answer, session.key)
    return answer


async def log_out(request: web.Request) -> web.Response:
    """`POST /logout`."""
    await request.app[SESSIONS].end(request[SESSION].key)
    raise web.HTTPSeeOther("/login")


def _next(request: web.Request) -> str:
    """Return where the log-in leads, which is a page of ours."""
    wanted = request.query.get("next", HOME)
    return wanted if _OWN_PATH.fullmatch(wanted) else HOME
