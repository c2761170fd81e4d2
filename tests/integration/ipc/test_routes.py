"""The route table, walked: every route is described, every write has its access, and no path has two meanings."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.wire import encode, parse

from ipc.peers import Policy
from ipc.routes import CALLER, OPERATOR, routes
from ipc.server import MethodNotAllowed, Table
from postroom._wire.operations import VERBS
from postroom.chassis.routes import Route
from postroom.errors import NotFound

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture
def table(room: Any) -> list[Route]:
    return routes(room.services)


OPEN_WRITES = {"/v1/send", "/v1/send/batch", "/v1/cloudevents"}
REASON = {"reason": "a test"}
QUESTIONS = {"/v1/sends"}  # which are too long for a query string


def test_every_write_but_sending_is_the_operators(table: list[Route]) -> None:
    for route in table:
        expected = CALLER if route.method == "GET" or route.path in OPEN_WRITES | QUESTIONS else OPERATOR
        if route.path.startswith(("/v1/outbox", "/v1/trace", "/v1/operator_log")):
            expected = OPERATOR
        assert route.access == expected, (route.method, route.path)


def test_no_two_routes_share_a_method_and_a_path(table: list[Route]) -> None:
    assert len({(route.method, route.path) for route in table}) == len(table)


def test_no_word_of_a_path_hides_an_id(table: list[Route]) -> None:
    """A `client_message_id` may be any word; a row whose word is `export` is found with a letter of it escaped."""
    known = Table(table)
    for path in {route.path for route in table if "{" not in route.path} - {"/v1/outbox/export"}:
        for route in table:
            if re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", route.path), path):
                assert known.find(route.method, path).route is route, (route.method, path)
    found = known.find("GET", "/v1/outbox/%65xport")
    assert (found.route.path, found.params) == ("/v1/outbox/{id}", {"id": "export"})


def test_every_verb_works_on_one_row_and_on_many(table: list[Route]) -> None:
    paths = {route.path for route in table}
    for verb in VERBS:
        assert f"/v1/outbox/{{id}}/{verb}" in paths
        assert f"/v1/outbox/{verb}" in paths


def test_every_write_with_a_body_names_its_type_and_every_route_its_answers(table: list[Route]) -> None:
    for route in table:
        assert route.answers, route.path
        assert route.summary
        if route.method == "POST" and not route.path.endswith("/subscription"):
            assert route.body is not None, route.path


async def test_a_body_that_a_route_does_not_take_is_refused_before_it_is_called(room: Any, table: list[Route]) -> None:
    """A `dry_run` that is not looked at would be done, and a filter would select everything."""
    for route in (route for route in table if route.body is None):
        reply = await room.request(route.method, re.sub(r"\{\w+\}", "orders", route.path), {"dry_run": True})
        assert (reply.status, reply.json["code"]) == (400, "bad_request"), route.path
        assert "takes no body: omit it" in reply.json["detail"]
    for nothing in (b"", b"{}"):
        assert (await room.request("DELETE", "/v1/topics/orders/subscription", nothing)).status == 204
        assert (await room.request("GET", "/v1/version", nothing)).status == 200


async def test_a_head_is_answered_as_a_get_without_its_body(room: Any, table: list[Route]) -> None:
    assert (await room.send({"to": "topic:orders"}, idempotency_key="k")).status == 202
    for route in (route for route in table if route.method == "GET"):
        path = route.path.format(id="k", client_message_id="k")
        got, head = await room.request("GET", path), await room.raw(encode("HEAD", path))
        assert parse(head).status == got.status, path
        assert parse(head).headers.get("content-type") == got.headers["content-type"], path
        assert head.endswith(b"\r\n\r\n"), path
        assert head.count(b"\r\n\r\n") == 1, path


async def test_no_answer_says_what_it_is_built_with(room: Any, table: list[Route]) -> None:
    replies = [await room.request("GET", route.path) for route in table if route.method == "GET"]
    replies += [await room.batch({"to": "topic:orders"}), await room.request("POST", "/v1/outbox/backup", REASON)]
    assert {reply.headers.get("server", "postroom") for reply in replies} == {"postroom"}


async def test_every_route_is_in_the_openapi_document_with_its_access(room: Any, table: list[Route]) -> None:
    reply = await room.request("GET", "/v1/openapi.json")
    document = reply.json
    assert document["openapi"] == "3.1.0"
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.method, route.path) for route in table}
    for route in table:
        operation = document["paths"][route.path][route.method.lower()]
        assert operation["x-access"] == route.access
        assert {str(status) for status in (*route.answers, *route.problems)} == set(operation["responses"])
        assert "400" in operation["responses"], route.path  # to a query string that the route does not take


async def test_the_file_in_the_docs_is_what_the_server_serves(room: Any) -> None:
    served = (await room.request("GET", "/v1/openapi.json")).json
    written = json.loads((DOCS / "openapi/daemon.json").read_text())
    served["info"]["version"] = written["info"]["version"]  # the server of a test has one of its own
    assert served == written, "run `make docs`"


async def test_whoever_may_not_operate_is_refused_on_every_operators_route(open_room: Any) -> None:
    room = await open_room(policy=Policy(operators=[4_000_000]))
    for route in routes(room.services):
        if route.access == OPERATOR:
            path = route.path.format(id="k", topic="orders")
            reply = await room.request(route.method, path, {"reason": "r"} if route.method == "POST" else None)
            assert (reply.status, reply.json["code"]) == (403, "not_an_operator"), path


async def test_whoever_may_not_call_is_refused_on_every_route(open_room: Any) -> None:
    room = await open_room(policy=Policy(allow_uids=[4_000_000], operators=[4_000_001]))
    for route in routes(room.services):
        path = route.path.format(id="k", client_message_id="k", topic="orders")
        reply = await room.request(route.method, path)
        assert (reply.status, reply.json["code"]) == (403, "peer_not_allowed"), path


async def test_a_fuzzer_that_knows_the_document_finds_no_5xx(room: Any) -> None:
    """Hypothesis draws requests from the document's own schemas, and breaks them; nothing may answer a 5xx."""
    document = (await room.request("GET", "/v1/openapi.json")).json
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(_fuzz, document, lambda raw: asyncio.run_coroutine_threadsafe(room.raw(raw), loop).result())
    assert (await room.request("GET", "/v1/ready")).status == 200


def _fuzz(document: dict[str, Any], exchange: Callable[[bytes], bytes]) -> None:
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]

    @settings(max_examples=300)
    @given(st.data())
    def attack(data: st.DataObject) -> None:
        method, path, operation = data.draw(st.sampled_from(operations))
        for parameter in operation["parameters"]:
            if parameter["in"] == "path":
                path = path.replace("{" + parameter["name"] + "}", data.draw(SEGMENTS))
        names = [parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "query"]
        query = data.draw(st.dictionaries(st.sampled_from([*names, "x"]), VALUES.filter(_is_short_wait), max_size=3))
        target = path + ("?" + urlencode(query) if query else "")
        content = operation.get("requestBody", {}).get("content", {})
        media = next(iter(content), "application/json")
        body = data.draw(_bodies(content.get(media, {}).get("schema"), document)) if content else None
        answer = exchange(encode(method, target, body, {"Content-Type": media} if content else None))
        assert answer, (method, target, body)
        assert parse(answer).status < 500, (method, target, body, answer[:300])

    attack()


SEGMENTS = st.sampled_from(["k", "01ARZ3NDEKTSV4RRFFQ69G5FAV", "a%20b", "%00", "..", "'", "x" * 129, "%F0%9F%93%AE"])
VALUES = st.sampled_from(["", "0", "1", "-1", "nan", "true", "pending", "topic:orders", "x", "\0", "9" * 30, "1e400"])


def _is_short_wait(value: str) -> bool:
    return value != "60"


def _bodies(schema: dict[str, Any] | None, document: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """Draw what the schema allows, what it nearly allows, and anything else."""
    name = (schema or {}).get("$ref", "").rpartition("/")[2]
    properties = document["components"]["schemas"].get(name, {}).get("properties", {})
    leaf = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), WORDS)
    value = st.recursive(
        leaf,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
        max_leaves=6,
    )
    likely = st.fixed_dictionaries({}, optional=dict.fromkeys(properties, value))
    proper = st.fixed_dictionaries(
        {"to": WORDS} if "to" in properties else {"reason": st.just("why")} if "reason" in properties else {},
        optional={key: value for key in properties if key not in ("to", "reason")},
    )
    return st.one_of(
        likely.map(lambda shape: json.dumps(shape).encode("utf-8", "surrogatepass")),
        proper.map(lambda shape: json.dumps(shape).encode("utf-8", "surrogatepass")),
        st.binary(max_size=50),
    )


WORDS = st.sampled_from(["topic:orders", "dm:bob", "queue:work", "now", "k", "pending", "dead", "2026-11-21T00:00:00Z"])


def test_a_path_is_taken_as_it_was_sent(table: list[Route]) -> None:
    found = Table(table)
    assert found.find("GET", "/v1/outbox/abc").params == {"id": "abc"}
    assert found.find("POST", "/v1/outbox/requeue").route.path == "/v1/outbox/requeue"
    for path in ("/v1/send/", "//v1/send", "/v1/%73end", "/v1/../v1/send", "/V1/send", "", "*", "/v1/outbox//requeue"):
        with pytest.raises(NotFound):
            found.find("POST", path)


def test_another_method_is_refused_with_those_that_are_taken(table: list[Route]) -> None:
    with pytest.raises(MethodNotAllowed) as refusal:
        Table(table).find("PUT", "/v1/topics/orders/subscription")
    assert refusal.value.allow == "DELETE, POST"
    with pytest.raises(MethodNotAllowed) as refusal:
        Table(table).find("PUT", "/v1/outbox/k")
    assert refusal.value.allow == "GET, HEAD"
    assert refusal.value.problem.status == 405
