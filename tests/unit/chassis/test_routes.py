from datetime import datetime

import msgspec
import pytest
from aiohttp import web
from yarl import URL

from postroom.chassis.routes import Access, Histogram, Route, application, decode_query, json_response, openapi
from postroom.errors import NotFound, NotPermitted


class Parcel(msgspec.Struct, forbid_unknown_fields=True):
    weight: int


class Paging(msgspec.Struct, forbid_unknown_fields=True):
    """Which parcels."""

    limit: int = 10
    fragile: bool | None = None
    since: datetime | None = None


async def weigh(request: web.Request) -> web.Response:
    paging = decode_query(request, Paging)
    if request.match_info["name"] == "lost":
        raise NotFound.of("parcel_not_found", "there is no parcel lost", retry_after=2.4)
    if request.match_info["name"] == "bomb":
        raise RuntimeError("secret detail")
    return json_response(Parcel(paging.limit))


ROUTES = [
    Route(
        method="GET",
        path="/v1/parcels/{name}",
        handler=weigh,
        access="caller",
        summary="Weigh a parcel.",
        query=Paging,
        answers={200: Parcel},
        problems=(400, 404),
    ),
    Route(
        method="POST",
        path="/v1/parcels",
        handler=weigh,
        access="nobody",
        summary="Add one.",
        body=Parcel,
        headers={"Idempotency-Key": "the parcel's id"},
        answers={201: Parcel},
        answer_headers={201: {"Location": "where the parcel is"}},
    ),
]


async def allow(_request: web.Request, access: str) -> None:
    if access != "caller":
        raise NotPermitted.of("not_permitted", "nobody may")


@pytest.fixture
async def client(aiohttp_client):
    return await aiohttp_client(application(ROUTES, allow))


async def test_a_route_answers_with_its_type(client):
    answer = await client.get("/v1/parcels/a", params={"limit": "3"})
    assert (answer.status, await answer.json()) == (200, {"weight": 3})
    assert answer.headers["Server"] == "postroom"
    asked = {"limit": "-3", "fragile": "false", "since": "2026-11-21T09:00:00Z"}
    assert (await client.get("/v1/parcels/a", params=asked)).status == 200


async def test_a_name_in_a_path_may_be_in_braces(client):
    for name in ("{c4f0a2de-9d3b-4f1f-8f43-6d9b5b2f7a10}", "%7Bnew%7D", "{", "a}b", "a%2F{b}"):
        assert (await client.get(URL(f"/v1/parcels/{name}", encoded=True))).status == 200, name


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/parcels/lost", 404, "parcel_not_found"),
        ("GET", "/v1/parcels/a?limit=x", 400, "invalid_query"),
        ("GET", "/v1/parcels/a?limit=1&limit=2", 400, "invalid_query"),
        ("GET", "/v1/parcels/a?limti=1", 400, "invalid_query"),
        ("GET", "/v1/parcels/a?limit=5.0", 400, "invalid_query"),
        ("GET", "/v1/parcels/a?limit=1e3", 400, "invalid_query"),
        ("GET", "/v1/parcels/a?fragile=1", 400, "invalid_query"),
        ("GET", "/v1/parcels/a?fragile=True", 400, "invalid_query"),
        ("GET", "/v1/parcels/a?fragile=null", 400, "invalid_query"),
        ("GET", "/v1/parcels/a?since=1", 400, "invalid_query"),
        ("GET", "/v1/parcels/a?since=null", 400, "invalid_query"),
        ("GET", "/nowhere", 404, "not_found"),
        ("DELETE", "/v1/parcels", 405, "method_not_allowed"),
        ("POST", "/v1/parcels", 403, "not_permitted"),
        ("GET", "/v1/parcels/bomb", 500, "internal_error"),
    ],
)
async def test_every_error_is_a_problem(client, method, path, status, code):
    answer = await client.request(method, path)
    problem = await answer.json(content_type="application/problem+json")
    assert (answer.status, problem["status"], problem["code"]) == (status, status, code)
    assert "secret detail" not in await answer.text()
    assert answer.headers["Server"] == "postroom"


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_an_answer_does_not_repeat_a_path_which_may_hold_a_token(client, method):
    assert "hush" not in await (await client.request(method, "/v1/hush")).text()
    assert "hush" not in await (await client.request(method, "/v1/parcels/hush")).text()


async def test_a_problem_that_knows_when_says_so_in_the_header(client):
    assert (await client.get("/v1/parcels/lost")).headers["Retry-After"] == "2"


async def test_a_wrong_method_is_told_the_right_ones(client):
    for path, allow, names in (("/v1/parcels", "POST", "POST"), ("/v1/parcels/a", "GET,HEAD", "GET, HEAD")):
        refused = await client.delete(path)
        problem = await refused.json(content_type="application/problem+json")
        assert (refused.headers["Allow"], problem["detail"]) == (allow, f"this path accepts {names}: use that")


@pytest.mark.parametrize(
    ("path", "status"),
    [("/v1/parcels/a", 200), ("/v1/parcels/a?limit=x", 400), ("/v1/parcels/lost", 404), ("/v1/parcels", 405)],
)
async def test_a_head_is_answered_as_a_get_without_its_body(client, path, status):
    got, head = await client.get(path), await client.head(path)
    assert (got.status, head.status, await head.read()) == (status, status, b"")
    assert head.headers["Content-Length"] == got.headers["Content-Length"]
    assert head.content_type == got.content_type


DOCUMENT = openapi(
    ROUTES,
    title="Parcels",
    version="1",
    description="An API.",
    bearer="Of a clerk.",
    access={"caller": Access("every caller", "optional"), "nobody": Access("nobody", "none")},
)


def test_the_document_describes_every_route_from_its_types():
    weighing = DOCUMENT["paths"]["/v1/parcels/{name}"]["get"]
    assert [parameter["name"] for parameter in weighing["parameters"]] == ["name", "limit", "fragile", "since"]
    assert set(weighing["responses"]) == {"200", "400", "404"}
    assert DOCUMENT["paths"]["/v1/parcels"]["post"]["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/Parcel"
    }
    assert {"Parcel", "Problem"} <= set(DOCUMENT["components"]["schemas"])


def test_the_document_names_each_operation_and_says_who_may_call_it():
    weighing, posting = DOCUMENT["paths"]["/v1/parcels/{name}"]["get"], DOCUMENT["paths"]["/v1/parcels"]["post"]
    assert [weighing["operationId"], posting["operationId"]] == ["get_parcels_name", "post_parcels"]
    assert weighing["description"] == "For every caller.\n\nWhich parcels."
    assert weighing["security"] == [{}, {"token": []}]
    assert posting["security"] == []
    assert DOCUMENT["components"]["securitySchemes"]["token"]["description"] == "Of a clerk."


def test_the_document_has_a_text_for_fields_parameters_and_headers():
    weighing, posting = DOCUMENT["paths"]["/v1/parcels/{name}"]["get"], DOCUMENT["paths"]["/v1/parcels"]["post"]
    assert [parameter["description"] for parameter in weighing["parameters"]][:2] == [
        "its name",
        "the most that one answer has",
    ]
    (header,) = posting["parameters"]
    assert (header["name"], header["in"], header["description"]) == ("Idempotency-Key", "header", "the parcel's id")
    assert posting["responses"]["201"]["headers"]["Location"]["description"] == "where the parcel is"
    problem = DOCUMENT["components"]["schemas"]["Problem"]
    assert all(shape["description"] for shape in problem["properties"].values())


def test_seconds_are_counted_under_the_bound_that_holds_them() -> None:
    histogram = Histogram((0.001, 0.01))
    for seconds in (0.0, 0.001, 0.00101, 99.0):
        histogram.observe(seconds)
    assert histogram.counts == [2, 1, 1]
    assert histogram.total == pytest.approx(99.00201)
    samples = histogram.family("seconds", "Of what").samples
    assert [sample.value for sample in samples if "le" in sample.labels] == [2, 3, 4]
