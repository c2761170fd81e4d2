"""The parts of a page: the templates, the values that each of them gets, and plots.

A plot is a path of SVG, so that it needs no script: as wide as there are minutes, and `HEIGHT` high; the page stretches
it. A table shows the same.

Jinja escapes every value. No page has a script or a style of its own.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode

from aiohttp import web
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from console.sessions import COOKIE, SESSION, Session, Sessions, new_cookie
from postroom._wire.digits import explain
from postroom._wire.programs import LATENCIES, Minute
from postroom._wire.words import ago, counted, span, when

_HERE: Final = Path(__file__).parent
STATIC: Final = {file.name: file.read_bytes() for file in sorted((_HERE / "static").iterdir())}
VERSION: Final = hashlib.sha256(b"".join(STATIC.values())).hexdigest()[:12]  # browsers keep a file under it for ever
SESSIONS: Final = web.AppKey("sessions", Sessions)
ROWS: Final = 50  # of a list on one page

HEIGHT: Final = 60
_GAP: Final = 0.2  # between two bars, where a minute is 1 wide
_LEAST: Final = 0.001  # seconds, at the foot of the scale of latencies
_DECADES: Final = math.log10(LATENCIES[-1] / _LEAST)

HOME: Final = "/"  # where a log-in leads
MESSAGES: Final = "/messages"
NAVIGATION: Final = (
    (HOME, "Overview"),
    (MESSAGES, "Messages"),
    ("/dead_letters", "Dead letters"),
    ("/consumers", "Consumers"),
    ("/unpublished", "Unpublished"),
    ("/jobs", "Jobs"),
    ("/programs", "Programs"),
    ("/log", "Log"),
)
ACCESS: Final = web.AppKey("access", dict[str, str])  # of each page, from the table of routes


def number(count: int) -> str:
    """Write a number with separators between thousands."""
    return f"{count:,}"


def with_query(**pairs: Any) -> str:
    """Return the query of a link, `?a=1&b=2`; what is not set is left out."""
    query = urlencode({name: value for name, value in pairs.items() if value not in (None, "")})
    return f"?{query}" if query else ""


def story_of(id_: str) -> str:
    """Return the address of the story of an id; browsers would resolve one that is a dot or two in a path."""
    return f"/find{with_query(id=id_)}" if id_ in {".", ".."} else f"/trace/{quote(id_, safe='')}"


_ENVIRONMENT: Final = Environment(
    loader=FileSystemLoader(_HERE / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= {each.__name__: each for each in (when, span, ago, number, counted)}
_ENVIRONMENT.filters |= {"path": lambda text: quote(text, safe=""), "story": story_of}
_ENVIRONMENT.globals |= {
    "home": HOME,
    "rows": ROWS,
    "height": HEIGHT,
    "version": VERSION,
    "navigation": NAVIGATION,
    "zip": zip,
    "explain": explain,
    "with_query": with_query,
}


def asked(request: web.Request) -> dict[str, str]:
    """Return the fields of a form or a link that are filled in; the others are empty for a template."""
    return defaultdict(str, {name: text for name, text in request.query.items() if text.strip()})


def page(request: web.Request, template: str, *, status: int = 200, **values: Any) -> web.Response:
    """Answer with a page; a browser without a cookie gets one, so that its forms can be recognised."""
    session: Session | None = request.get(SESSION)
    cookie = request.cookies.get(COOKIE, "") if session is None else session.key
    fresh = not cookie
    cookie = cookie or new_cookie()
    text: str = _ENVIRONMENT.get_template(template).render(
        session=session,
        here=request.path,
        access=request.app[ACCESS],
        form_key=request.app[SESSIONS].form_key(cookie),
        **values,
    )
    answer = web.Response(text=text, content_type="text/html", status=status)
    if fresh:
        set_cookie(request, answer, cookie)
    return answer


def set_cookie(request: web.Request, answer: web.StreamResponse, value: str) -> None:
    """Set the cookie: no script reads it, no other site's page sends it, and with TLS no plain request does."""
    answer.set_cookie(COOKIE, value, path="/", httponly=True, samesite="Strict", secure=request.app[SESSIONS].secure)


async def mesh_of(request: web.Request, given: dict[str, str]) -> tuple[str | None, list[str]]:
    """Return the mesh of a page, the requested one or else the first, and those to choose from."""
    session = request[SESSION]
    if session.mesh is not None:
        return session.mesh, [session.mesh]
    meshes = [mesh.slug for mesh in await session.client.list_meshes()]
    return given.get("mesh") or next(iter(meshes), None), meshes


def draw(minutes: Sequence[Minute]) -> dict[str, str]:
    """Draw the counts of each minute as bars, and the latencies as lines on a logarithmic scale."""
    counts = {name: bars([getattr(one, name) for one in minutes]) for name in ("accepted", "handled", "dead_lettered")}
    return counts | {name: _line([getattr(one, name) for one in minutes]) for name in ("p50", "p99")}


def bars(counts: Sequence[int]) -> str:
    """Return a bar for each count."""
    most = max(counts, default=0)
    return "".join(
        f"M{place + _GAP / 2:.1f} {HEIGHT}v-{HEIGHT * count / most:.1f}h{1 - _GAP:.1f}V{HEIGHT}z"
        for place, count in enumerate(counts)
        if count
    )


def _line(latencies: Sequence[float | None]) -> str:
    """Return a line that is interrupted where nothing was handled."""
    pieces, joined = [], False
    for place, seconds in enumerate(latencies):
        if seconds is not None:
            height = HEIGHT * math.log10(max(seconds, _LEAST) / _LEAST) / _DECADES
            pieces.append(f"{'L' if joined else 'M'}{place} {HEIGHT - height:.1f}h1")
        joined = seconds is not None
    return "".join(pieces)
