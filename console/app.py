"""The console's pages: one table of routes, logging in and out, and what every answer has in common.

The rule is docs/contract/operate.md#operate-72.
"""

from http import HTTPStatus
from typing import Final

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from console import messages, nouns, overview, repairs
from console.sessions import OWN_PATH, SESSION, Sessions, next_of, page_of
from console.views import ACCESS, HOME, SESSIONS, STATIC, page, set_cookie
from postroom.chassis.routes import Handler, Route, application, unforeseen
from postroom.errors import NotFound, PostroomError

_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "same-origin",  # `no-referrer` would take the origin from our own forms too
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_FOR_EVER: Final = "public, max-age=31536000, immutable"
_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


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
    """Return where the log-in leads, always a page of the console."""
    wanted = request.query.get("next", HOME)
    return wanted if OWN_PATH.fullmatch(wanted) else HOME


ROUTES: Final = [
    Route("GET", "/login", show_login, "anyone", "The form to log in with"),
    Route("POST", "/login", log_in, "anyone", "Log in with a token"),
    Route("POST", "/logout", log_out, "member", "Log out"),
    Route("GET", "/", overview.show_overview, "member", "How much waits where"),
    Route("GET", "/live", overview.stream_overview, "look everywhere", "The same as server-sent events"),
    Route("GET", "/messages", messages.show_messages, "member", "Find messages"),
    Route("GET", "/messages/{id}/body", messages.show_body, "member", "The body of a message, as a file"),
    Route("GET", "/find", messages.find, "member", "Go to the story of an id"),
    Route("GET", "/trace/{id}", messages.show_story, "member", "The story of a message"),
    Route("GET", "/dead_letters", nouns.show_causes, "look", "Why messages are dead"),
    Route("GET", "/dead_letters/list", nouns.list_letters, "look", "Dead letters to choose from"),
    Route("GET", "/dead_letters/{mesh}/{id}", nouns.show_letter, "look", "A dead letter, whole"),
    Route("GET", "/consumers", nouns.show_consumers, "look everywhere", "How far behind each consumer is"),
    Route("GET", "/unpublished", nouns.show_unpublished, "look everywhere",
          "What waits to be published, and what is refused"),
    Route("GET", "/jobs", nouns.list_jobs, "look", "Jobs"),
    Route("GET", "/jobs/{id}", nouns.show_job, "look", "A job with its tree"),
    Route("GET", "/programs", nouns.show_programs, "look", "The programs of all hosts"),
    Route("GET", "/log", nouns.show_log, "look everywhere", "What operators changed"),
    Route("POST", "/repairs", repairs.plan, "repair", "Dry-run a verb"),
    Route("GET", "/repairs/{id}", repairs.show_repair, "repair", "What would be done, its progress, its outcome"),
    Route("POST", "/repairs/{id}", repairs.begin, "repair", "Do what was planned"),
]  # fmt: skip


def build(sessions: Sessions) -> web.Application:
    """Build the application."""
    static = Route("GET", "/static/{name}", show_static, "anyone", "A style, a script, a picture")
    app = application([*ROUTES, static], sessions.authorize)
    app[SESSIONS] = sessions
    app[ACCESS] = {route.path: route.access for route in ROUTES if route.method == "GET"}
    app[overview.WATCH] = overview.Watch()
    app.cleanup_ctx.append(repairs.remember)
    app.middlewares.append(problems_as_pages)
    app.on_response_prepare.append(add_headers)
    return app


async def show_static(request: web.Request) -> web.Response:
    """`GET /static/{name}`."""
    name = request.match_info["name"]
    if name not in STATIC:
        raise NotFound.of("not_found", f"there is no file {name[:64]!r}")
    headers = {"Cache-Control": _FOR_EVER}
    return web.Response(body=STATIC[name], content_type=_TYPES[name.rpartition(".")[2]], headers=headers)


@web.middleware
async def problems_as_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Show what went wrong as a page; who is logged out, or has a token that is not valid any more, logs in again."""
    try:
        return await handler(request)
    except PostroomError as error:
        problem, session = error.problem, request.get(SESSION)
        if problem.code == "invalid_token" and session is not None:
            await request.app[SESSIONS].end(session.key)
            raise web.HTTPSeeOther(f"/login{next_of(request)}") from error
        return problem_page(request, problem.status, problem.detail, problem.code)
    except web.HTTPException as error:
        if error.status < HTTPStatus.BAD_REQUEST:
            raise
        missing = error.status == HTTPStatus.NOT_FOUND
        path = request.path[:200]
        sentence = f"there is no page {path}" if missing else f"{request.method} {path}: {error.reason}"
        return problem_page(request, error.status, sentence, HTTPStatus(error.status).name.lower())
    except RequestPayloadError:  # nobody is there any more who could read a page
        raise
    except Exception as error:
        session = request.get(SESSION)
        if session is not None and request.app[SESSIONS].is_over(session.key):  # by another page: its client is closed
            raise web.HTTPSeeOther(f"/login{next_of(request)}") from error
        bug = unforeseen(request)
        return problem_page(request, bug.status, bug.detail, bug.code)


def problem_page(request: web.Request, status: int, sentence: str, code: str) -> web.Response:
    """Say what went wrong, and link to the page where it did."""
    back = HOME if code in {"not_found", "method_not_allowed"} else page_of(request)
    return page(request, "problem.html", status=status, sentence=sentence, code=code, back=back)


async def add_headers(_request: web.Request, answer: web.StreamResponse) -> None:
    """Forbid browsers what no page of the console needs."""
    answer.headers.update(_HEADERS)
    answer.headers.setdefault("Cache-Control", "no-store")
