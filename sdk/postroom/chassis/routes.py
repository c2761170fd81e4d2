"""An HTTP API as one literal table, and what follows from it: the application, its checks, its OpenAPI document.

A program lists its `Route`s (method, path, handler, who may call, types in and out); `application` builds the aiohttp
application from them, `openapi` the document from the same types that decode the requests, and a test walks the table.
Every error is answered as `application/problem+json`, and metrics in Prometheus' text format (`exposition`).
"""

import tomllib
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from functools import cache, lru_cache
from http import HTTPStatus
from importlib.resources import files
from inspect import cleandoc, getdoc
from itertools import accumulate
from types import NoneType
from typing import Any, Final, Literal, NamedTuple, TypeVar

import msgspec
import structlog
from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11
from aiohttp.web_protocol import RequestPayloadError
from prometheus_client import generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from postroom._wire.transport import JSON
from postroom._wire.words import shape_fault
from postroom.errors import PROBLEM_JSON, InvalidMessage, PostroomError, Problem

_log = structlog.get_logger(__name__)

Handler = Callable[[Any], Awaitable[web.StreamResponse]]  # takes a server's own kind of request
Authorize = Callable[[web.Request, str], Awaitable[None]]
Q = TypeVar("Q", bound=msgspec.Struct)

INTERNAL_ERROR: Final = PostroomError.of("internal_error", "internal error: see the log", retryable=True).problem
_NO_ROUTE: Final = "this program has no such route: check the address, and whether it is older than the caller"
BROKEN_BODY: Final = PostroomError.of("bad_request", "the body does not match its headers").problem


_LATER: Final = (408, 429, 500, 502, 503, 504, 507)  # statuses that may say when to try again
_FORMS: Final[dict[type, str]] = {  # of a parameter; msgspec takes other texts for these too, such as 1 for true
    bool: "true or false",
    int: "a whole number, as in 5",
    datetime: "a time, as in 2026-11-21T09:00:00Z",
    NoneType: "omitted, or have a value",
}
SERVER: Final = "postroom"
_RETRY_AFTER: Final = "Retry-After"
_NUMBERS: Final = "A whole number is written without a fraction: 5, not 5.0."  # which JSON Schema does not say
_WHEN: Final = "seconds to wait before another try, where the problem has `retry_after`"


@dataclass(frozen=True)
class Route:
    """One row of an API's table. `access` is a word that the program's `Authorize` understands.

    `answers` maps a status to the type of its body (None: no JSON body); problems are added to every route. `headers`
    are those that the handler reads, `answer_headers` those that an answer of a status may have, each with its text.
    """

    method: str
    path: str
    handler: Handler
    access: str
    summary: str
    _: KW_ONLY
    body: type | None = None
    body_media: str = JSON
    query: type[msgspec.Struct] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    answer_headers: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    answers: Mapping[int, Any] = field(default_factory=dict)
    answer_media: str = JSON
    problems: Sequence[int] = (400,)

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that the route answers: a HEAD like a GET, without the body."""
        return ("GET", "HEAD") if self.method == "GET" else (self.method,)


def application(routes: Iterable[Route], authorize: Authorize, **options: Any) -> web.Application:
    """Build the aiohttp application: each route behind its access check, every error a problem."""
    app = bare_application(**options)
    for route in routes:
        path = route.path.replace("}", ":[^/]+}")  # aiohttp's own pattern finds no name that has braces
        for method in route.methods:  # of the answer to a HEAD, aiohttp leaves out the body
            app.router.add_route(method, path, _guarded(route, authorize), expect_handler=_go_on)
    return app


def bare_application(**options: Any) -> web.Application:
    """Build one without routes, whose errors are problems, and whose answers do not say what it is built with."""
    app = web.Application(middlewares=[problems], **options)
    app.on_response_prepare.append(_name)
    return app


async def _name(_request: web.Request, answer: web.StreamResponse) -> None:
    answer.headers["Server"] = SERVER


def _guarded(route: Route, authorize: Authorize) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        await authorize(request, route.access)
        if route.answers:  # of a route of an API, not of a page
            refuse_what_is_not_taken(request, route)
        return await route.handler(request)

    return handle


async def _go_on(request: web.Request) -> web.StreamResponse | None:
    """Meet the one expectation that can be met; the errors of aiohttp's own handler bypass the middleware."""
    if request.version < HttpVersion11:
        return None
    if request.headers["Expect"].lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
        return None
    detail = "the only expectation that can be met is 100-continue: omit any other"
    return problem_response(PostroomError.of("expectation_failed", detail, status=417).problem)


def refuse_request_line(request: web.BaseRequest) -> None:
    """Raise `PostroomError`: 505 for a version after HTTP/1.1, 400 for one before 1.0, for none, and for a fragment."""
    said = request._version  # noqa: SLF001 - aiohttp answers in this version, from its first look at `version` on
    if not HttpVersion10 <= said <= HttpVersion11:
        request._version = HttpVersion11  # noqa: SLF001 - as above
    if said > HttpVersion11:
        sentence = f"this is HTTP/1.1, and the request says HTTP/{said.major}.{said.minor}: use 1.1"
        raise PostroomError.of("http_version_not_supported", sentence, status=505)
    if said < HttpVersion10:
        raise PostroomError.of("bad_request", "the request is HTTP/0.9, or names no version: use HTTP/1.1")
    if "#" in request.raw_path:
        raise PostroomError.of("bad_request", "a target has no fragment: omit what begins with #")


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into its problem answer; an unexpected one is logged and becomes a 500."""
    try:
        refuse_request_line(request)
        return await handler(request)
    except PostroomError as error:
        return problem_response(error.problem)
    except web.HTTPException as error:
        if error.status < HTTPStatus.BAD_REQUEST:
            raise
        code = HTTPStatus(error.status).name.lower()
        if isinstance(error, web.HTTPMethodNotAllowed):
            answer = problem_response(wrong_method(error.allowed_methods))
            answer.headers["Allow"] = error.headers["Allow"]
            return answer
        # without the path, which may hold a token
        detail = _NO_ROUTE if error.status == HTTPStatus.NOT_FOUND else error.reason
        return problem_response(PostroomError.of(code, detail, status=error.status).problem)
    except RequestPayloadError:
        return problem_response(BROKEN_BODY, close=True)
    except Exception:  # noqa: BLE001 - the last net: a bug answers 500 and is logged, the process lives
        return problem_response(unforeseen(request))


def wrong_method(accepted: Iterable[str]) -> Problem:
    """Return the problem (405) of a request whose path accepts only these methods."""
    detail = f"this path accepts {', '.join(sorted(accepted))}: use that"
    return PostroomError.of("method_not_allowed", detail, status=405).problem


def unforeseen(request: web.Request) -> Problem:
    """Log the error that is being handled, which is a bug, and return what the answer says of it."""
    _log.exception("unforeseen_error", method=request.method, path=request.path)
    return INTERNAL_ERROR


def problem_headers(problem: Problem) -> dict[str, str]:
    """Return what the head of an answer says of `problem` (RFC 9110): when to try again, and how to authenticate."""
    headers = {}
    if problem.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(problem.retry_after)))  # whole seconds
    if problem.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def problem_response(problem: Problem, *, close: bool = False) -> web.Response:
    """Answer with `problem` (RFC 9457), and with its headers; `close` ends the connection after it."""
    body = msgspec.json.encode(problem)
    headers = {"Server": SERVER, **problem_headers(problem)}  # also where no application answers
    answer = web.Response(status=problem.status, body=body, content_type=PROBLEM_JSON, headers=headers)
    if close:
        answer.force_close()
    return answer


def json_response(value: Any, status: int = 200) -> web.Response:
    """Answer with `value` encoded by msgspec."""
    return web.Response(status=status, body=msgspec.json.encode(value), content_type=JSON)


@lru_cache(maxsize=64)
def is_media(header: str, media: str) -> bool:
    """Return whether a `Content-Type` is `media` in UTF-8."""
    kind, *parameters = (part.strip().lower() for part in header.split(";"))
    return kind == media and all(part in ("", "charset=utf-8", 'charset="utf-8"') for part in parameters)


def bearer_token(request: web.BaseRequest) -> str:
    """Return the token of a request; empty where it has none, or more than one `Authorization`."""
    given = request.headers.getall("Authorization", [])
    scheme, _, token = (given[0] if len(given) == 1 else "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def decode_query(request: web.BaseRequest, query: type[Q]) -> Q:
    """Decode the query string into `query`; an unknown or repeated parameter is a 400 that names it."""
    pairs = list(request.query.items())
    if len({name for name, _ in pairs}) != len(pairs):
        raise InvalidMessage.of("invalid_query", "a query parameter is given twice: give it once")
    try:
        found = msgspec.convert(dict(pairs), query, strict=False)
    except msgspec.ValidationError as error:
        field, sentence = shape_fault(error, query)
        sentence = f"check the query string: {sentence}"
        raise InvalidMessage.of("invalid_query", sentence, field=field) from error
    for name, text in pairs:
        value = getattr(found, name)
        if (form := _FORMS.get(type(value))) is None:
            continue
        if not (":" in text if isinstance(value, datetime) else text == str(value).lower()):
            raise InvalidMessage.of("invalid_query", f"check the query string: {name} must be {form}", field=name)
    return found


def refuse_what_is_not_taken(request: web.BaseRequest, route: Route) -> None:
    """Raise `InvalidMessage` for a query or a body where the route takes none: a `dry_run` there would be done.

    Two bytes, as `{}`, say nothing: there are clients that send them with every request.
    """
    if route.query is None and request.query_string:
        raise InvalidMessage.of("invalid_query", f"{route.path} takes no query parameters: omit them")
    if route.body is None and request.can_read_body and request.content_length != len("{}"):
        raise InvalidMessage.of("bad_request", f"{route.method} {route.path} takes no body: omit it")


class Access(NamedTuple):
    """Who may call a route, in words, and whether that takes a bearer token: with `optional` others may call too."""

    who: str
    bearer: Literal["needed", "optional", "none"] = "needed"


def openapi(
    routes: Iterable[Route], *, title: str, version: str, description: str, bearer: str, access: Mapping[str, Access]
) -> dict[str, Any]:
    """Describe the routes as an OpenAPI 3.1 document, its schemas from the types that decode and encode.

    `bearer` describes the token that callers send, and `access` explains the word of each route.
    """
    routes = list(routes)
    types = [
        kind for route in routes for kind in (route.body, route.query, *route.answers.values()) if kind is not None
    ]
    schema, components = describe([*types, Problem], "#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        who, needed = access[route.access]
        words = [word.strip("{}").split(":")[0] for word in route.path.strip("/").split("/") if word != "v1"]
        operation: dict[str, Any] = {
            "operationId": "_".join([route.method.lower(), *words]).replace(".", "_"),
            "tags": [words[0].removesuffix(".json")],
            "summary": route.summary,
            "description": "\n\n".join(
                filter(None, (f"For {who}.", None if route.query is None else getdoc(route.query)))
            ),
            "x-access": route.access,
            "security": [{}] * (needed == "optional") + [{"token": []}] * (needed != "none"),
            "parameters": _parameters(route),
            "responses": {
                **{
                    str(status): _answer(status, route.answer_media, kind, schema, route.answer_headers.get(status, {}))
                    for status, kind in route.answers.items()
                },
                **{str(status): _answer(status, PROBLEM_JSON, Problem, schema, {}) for status in route.problems},
            },
        }
        if route.body is not None:
            operation["requestBody"] = {
                "required": True,
                "content": {route.body_media: {"schema": schema[repr(route.body)]}},
            }
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version, "description": f"{description} {_NUMBERS}"},
        "paths": paths,
        "components": {
            "schemas": components,
            "headers": {_RETRY_AFTER: {"description": _WHEN, "schema": {"type": "integer", "minimum": 1}}},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": bearer}},
        },
    }


def describe(types: Sequence[Any], ref_template: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the JSON schema of each of `types` by its repr, and the components that they refer to by name.

    Every field has its text, from the type itself or else from `_wire/fields.toml`.
    """
    refs, components = msgspec.json.schema_components(types, ref_template=ref_template)
    texts = _texts()
    for name, schema in components.items():
        if "description" in schema:  # a docstring, which has its indentation before Python 3.13
            schema["description"] = cleandoc(schema["description"])
        own = texts.get(name.partition("_")[0], {})  # a generic type goes on with its parameter
        for key, shape in schema.get("properties", {}).items():
            if (text := own.get(key, texts.get(key))) is not None:
                shape.setdefault("description", text)
    return dict(zip(map(repr, types), refs, strict=True)), components


@cache
def _texts() -> dict[str, Any]:
    """Return what each field means, by its name; by a type's name, those of its fields that mean something else."""
    return tomllib.loads(files("postroom._wire").joinpath("fields.toml").read_text("utf-8"))


def _parameters(route: Route) -> list[dict[str, Any]]:
    names = [part[1:-1].split(":")[0] for part in route.path.split("/") if part.startswith("{")]
    path = msgspec.defstruct("Path", [(name, str) for name in names])
    found = []
    for place, kind in (("path", path), ("query", route.query)):
        if kind is not None:
            _, components = describe([kind], "{name}")
            shapes = components[kind.__name__]
            found += [
                {
                    "name": name,
                    "in": place,
                    "required": name in shapes.get("required", ()),
                    "description": shape.pop("description", ""),
                    "schema": shape,
                }
                for name, shape in shapes["properties"].items()
            ]
    return found + [
        {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in route.headers.items()
    ]


def _answer(status: int, media: str, kind: Any, schema: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    # the phrases of errors are not the same in every Python
    answer: dict[str, Any] = {"description": "a problem" if kind is Problem else HTTPStatus(status).phrase}
    if kind is not None:
        answer["content"] = {media: {"schema": schema[repr(kind)]}}
    headers: dict[str, Any] = {
        name: {"description": text, "schema": {"type": "string"}} for name, text in texts.items()
    }
    if kind is Problem and status in _LATER:
        headers[_RETRY_AFTER] = {"$ref": f"#/components/headers/{_RETRY_AFTER}"}
    if headers:
        answer["headers"] = headers
    return answer


class Histogram:
    """How many of what took seconds took at most each of `bounds` and longer than the one before, and their sum.

    `counts` has one more, of what took longer than all.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """Count one of them."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.total += seconds

    def family(self, name: str, documentation: str) -> Metric:
        """Return it as a metric; Prometheus wants the counts added up."""
        buckets = list(zip([*map(str, self.bounds), "+Inf"], accumulate(self.counts), strict=True))
        return HistogramMetricFamily(name, documentation, buckets=buckets, sum_value=self.total)


def exposition(families: Iterable[Metric]) -> bytes:
    """Write `families` with their samples, what one scrape found, in Prometheus' text format."""
    return generate_latest(_Scrape(list(families)))


class _Scrape(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
