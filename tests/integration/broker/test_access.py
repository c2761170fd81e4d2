"""Nobody crosses: not without a token, not with a revoked one, not into another mesh, not above one's role."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from multidict import CIMultiDict

from broker.app import routes
from broker.authentication import Authentication, digest
from broker.database import QUERIES
from postroom import BrokerClient
from postroom._wire.dead_letters import DeadLetter
from postroom._wire.sql import load_queries
from postroom.delivery.dead_letters import columns
from postroom.once import open_registry

Message = Callable[..., dict[str, Any]]


PATH = {"mesh": "demo", "name": "orders", "member": "bob", "webhook": "x", "broker_message_id": "x", "id": "x"}
OPERATORS = {f"{role} {reach}": (role, reach) for role in ("look", "repair", "administer") for reach in ("all", "demo")}
ADMITTED = {
    "anyone": {"alice", "ada", "administrator", *OPERATORS},
    "member": {"alice", "ada"},
    "reader": {"alice", "ada", "administrator", *OPERATORS},
    "itself": {"alice", "ada", "administrator", "administer all", "administer demo"},
    "look": {"ada", "administrator", *OPERATORS},
    "repair": {"ada", "administrator", "repair all", "repair demo", "administer all", "administer demo"},
    "administer": {"ada", "administrator", "administer all", "administer demo"},
    "broker_look": {"administrator", "look all", "repair all", "administer all"},
    "broker_repair": {"administrator", "repair all", "administer all"},
    "broker_administer": {"administrator", "administer all"},
}
MANY_LINES = """
INSERT INTO mesh.operator_log (at, actor, verb, noun, key, outcome)
SELECT now() - number * interval '1 second', 'ann', 'drop', 'dead letter', 'demo ' || number, 'dropped'
FROM generate_series(20000, 1, -1) AS number
"""
CONTROL_PLANE = {"/health", "/ready", "/metrics", "/openapi.json"}


async def operator(broker: Any, name: str, role: str, mesh: str | None = None) -> Any:
    """Create an operator, and return it as a caller."""
    made = await broker.admin.post("/v1/operators", {"name": name, "role": role, "mesh": mesh})
    assert made.status == 201, made.body
    return replace(broker.admin, token=made.body["token"])


async def test_every_route_but_the_control_plane_needs_a_token(broker: Any) -> None:
    for route in routes(broker.services):
        answer = await broker.nobody.call(route.method, route.path.format(**PATH))
        if route.path in CONTROL_PLANE:
            assert (route.access, answer.status) == ("anyone", 200), route.path
        else:
            assert (answer.status, answer.code) == (401, "missing_token"), route.path


async def test_a_token_that_is_nobodys_opens_nothing(broker: Any) -> None:
    session, url = broker.nobody.session, broker.url + "/v1/features"
    for header in ("Bearer nonsense", "Bearer " + "x" * 5000, "Basic YTpi", "Bearer", "Bearer \u00e9", ""):
        async with session.get(url, headers={"Authorization": header}) as answer:
            assert answer.status == 401
            assert "nonsense" not in await answer.text()


async def test_a_token_says_whom_it_speaks_for_and_what_it_may_do(broker: Any) -> None:
    said = {}
    for caller in (broker.admin, broker.member("ada"), broker.member("alice")):
        async with BrokerClient(broker.url, caller.token) as client:
            said[caller] = msgspec.structs.astuple(await client.whoami())

    assert list(said.values()) == [
        ("administrator", "administer", None),
        ("ada of demo", "administer", "demo"),
        ("alice of demo", "member", "demo"),
    ]


async def test_every_route_admits_the_roles_that_it_names_and_nobody_else(broker: Any, message: Message) -> None:
    await broker.member("alice").send_one(message("id-1"))  # so that the mesh cannot be deleted
    await broker.add_mesh("other", {"oscar": "admin"})
    callers = {"alice": broker.member("alice"), "ada": broker.member("ada"), "administrator": broker.admin}
    for name, (role, reach) in OPERATORS.items():
        callers[name] = await operator(broker, f"{role}-{reach}", role, None if reach == "all" else reach)
    seen: dict[str, set[str]] = {}
    for route in routes(broker.services):
        for name, caller in callers.items():
            itself = "alice" if route.path.endswith("token") else "nobody"
            path = route.path.format(**{**PATH, "name": itself, "member": "alice"})
            answer = await caller.call(route.method, path, None if route.method == "GET" else {})
            if answer.status == 200 and path == "/v1/members/demo/alice/token":
                callers["alice"] = replace(broker.admin, token=answer.body["token"])
            refused = answer.status == 403 and answer.code in ("not_permitted", "not_a_member")
            assert answer.status not in (401, 500), (name, route.method, route.path, answer.body)
            assert refused == (name not in ADMITTED[route.access]), (name, route.method, route.path, answer.body)
            seen.setdefault(route.access, set()).add(name)

    assert {access: set(callers) for access in ADMITTED} == seen


async def test_a_parameter_that_a_route_does_not_take_is_refused_by_name(broker: Any) -> None:
    for route in routes(broker.services):
        if route.method == "GET" and route.query is not None:
            answer = await broker.admin.get(route.path.format(**PATH), misspelt="x")
            assert (answer.status, answer.code) == (400, "invalid_query"), route.path


async def test_who_may_only_look_changes_nothing(broker: Any) -> None:
    for route in routes(broker.services):
        if route.method != "GET":
            assert not {"look all", "look demo"} & ADMITTED[route.access], route


async def test_an_operator_of_a_mesh_reaches_no_other(broker: Any) -> None:
    await broker.add_mesh("other", {"oscar": "admin"})
    ann = await operator(broker, "ann", "administer", "demo")
    crossings = [
        await ann.get("/v1/members", mesh="other"),
        await ann.get("/v1/history", mesh="other"),
        await ann.get("/v1/dead_letters", mesh="other"),
        await ann.get("/v1/jobs", mesh="other"),
        await ann.post("/v1/dead_letters/drop", {"mesh": "other", "reason": "x", "filter": {}}),
        await ann.post("/v1/jobs/cancel", {"mesh": "other", "reason": "x", "filter": {}}),
        await ann.post("/v1/members", {"mesh": "other", "name": "spy"}),
        await ann.delete("/v1/topics/other/orders"),
    ]

    assert {(answer.status, answer.code) for answer in crossings} == {(403, "other_mesh")}
    assert (await ann.post("/v1/members", {"mesh": "demo", "name": "carol"})).status == 201
    assert (await ann.get("/v1/whoami")).body == {"actor": "ann", "role": "administer", "mesh": "demo"}


async def test_bodies_are_for_who_may_repair(broker: Any, message: Message, postgres: Any) -> None:
    said = "between us"
    (sent,) = await broker.member("alice").send(message("id-1", body=said))
    buried = DeadLetter(
        message_id="id-2", original_subject="demo.orders", reason="rejected", attempts=1, headers={"X-Says": said}
    )
    await postgres.execute(load_queries("postroom.delivery.dead_letters", "record.sql")["keep"],
                           *columns("demo", buried), said.encode())  # fmt: skip
    job = str(uuid4())
    wanted = {"mesh": "demo", "flow": "export", "first": "export", "id": job, "request": said}
    assert (await broker.admin.post("/v1/jobs", wanted)).status == 201
    activity = (await broker.admin.get(f"/v1/jobs/{job}")).body["activities"][0]["id"]
    async with (
        open_registry(broker.services.config.database_url) as registry,
        registry.once("demo", "orders", "id-3") as key,
    ):
        key.result = said
    looker, repairer = await operator(broker, "lea", "look"), await operator(broker, "rob", "repair")
    for path, shows in {
        "/v1/history?mesh=demo": "id-1",
        f"/v1/messages/{sent.broker_message_id}": "id-1",
        "/v1/dead_letters/demo/id-2": "id-2",
        f"/v1/jobs/{job}": activity,
        f"/v1/jobs/messages/{activity}": activity,
        "/v1/once/key?tenant=demo&topic=orders&key=id-3": "id-3",
    }.items():
        hidden, shown = await looker.get(path), await repairer.get(path)
        assert shows in str(hidden.body), path
        assert said not in str(hidden.body), path
        assert said in str(shown.body), path


async def test_an_operator_is_refused_as_soon_as_it_is_revoked_and_its_name_stays_taken(broker: Any) -> None:
    ann = await operator(broker, "ann", "administer")
    assert (await ann.get("/v1/meshes")).status == 200
    rotated = await broker.admin.post("/v1/operators/ann/token")
    assert (await ann.get("/v1/meshes")).status == 401
    ann = replace(broker.admin, token=rotated.body["token"])
    assert (await ann.get("/v1/meshes")).status == 200
    assert (await broker.admin.delete("/v1/operators/ann")).status == 204

    assert (await ann.get("/v1/meshes")).status == 401
    again = await broker.admin.post("/v1/operators", {"name": "ann", "role": "look"})
    assert (again.status, again.code) == (409, "operator_exists")
    listed = (await broker.admin.get("/v1/operators")).body["operators"]
    assert [(one["name"], one["role"], "revoked_at" in one) for one in listed] == [("ann", "administer", True)]
    assert (await broker.admin.delete("/v1/operators/ann")).status == 404


async def test_what_an_operator_does_is_logged_under_the_name_that_was_authenticated(broker: Any) -> None:
    ann = await operator(broker, "ann", "administer")
    await ann.post("/v1/meshes", {"slug": "plant"})
    assert (await broker.admin.post("/v1/operators", {"name": "administrator", "role": "look"})).status == 400

    lines = (await broker.admin.get("/v1/operator_log")).body["lines"]
    assert [(one["actor"], one["verb"], one["key"], one["outcome"]) for one in lines[:2]] == [
        ("ann", "create", "plant", "done"),
        ("administrator", "create", "ann", "may administer in every mesh"),
    ]


@pytest.mark.parametrize(("key", "index"), [("demo 7", "operator_log_key"), (None, "operator_log_time")])
async def test_a_few_lines_are_found_without_a_look_at_the_whole_log(
    postgres: Any, key: str | None, index: str
) -> None:
    transaction = postgres.transaction()
    await transaction.start()
    await postgres.execute("TRUNCATE mesh.operator_log")  # into room that others had, lines would go in any order
    await postgres.execute(MANY_LINES)
    await postgres.execute("ANALYZE mesh.operator_log")
    since = datetime.fromtimestamp(0, UTC) if key else datetime.now(UTC)
    values = None, None, None, key, since, None, 101, None, None
    plan = await postgres.fetch(f"EXPLAIN {QUERIES['list_operations']}", *values)
    await transaction.rollback()
    assert index in "".join(row[0] for row in plan)


async def test_who_looks_in_one_mesh_sees_what_was_done_to_that_alone(broker: Any) -> None:
    ann, ada = await operator(broker, "ann", "look", "demo"), broker.member("ada")
    await broker.add_mesh("other", {"oscar": "admin"})
    for mesh in ("demo", "other"):
        assert (await broker.admin.post("/v1/topics", {"mesh": mesh, "name": "seen"})).status == 201

    def keys(answer: Any) -> list[str]:
        return [line["key"] for line in answer.body["lines"] if line["noun"] == "topic"]

    assert keys(await broker.admin.get("/v1/operator_log"))[:2] == ["other seen", "demo seen"]
    for answer in (await ann.get("/v1/operator_log"), await ada.get("/v1/operator_log", mesh="demo")):
        assert keys(answer)[0] == "demo seen"
        assert {line["key"].split()[0] for line in answer.body["lines"]} == {"demo"}
    assert keys(await broker.admin.get("/v1/operator_log", mesh="other"))[0] == "other seen"
    assert (await ann.get("/v1/operator_log", mesh="other")).status == 403
    assert (await broker.member("alice").get("/v1/operator_log")).status == 403


async def test_an_admin_of_a_mesh_may_not_administer_meshes(broker: Any) -> None:
    ada = broker.member("ada")

    assert (await ada.post("/v1/meshes", {"slug": "mine"})).status == 403
    assert (await ada.get("/v1/meshes")).status == 403
    assert (await ada.delete("/v1/meshes/demo")).status == 403


async def test_an_admin_of_a_mesh_administers_its_own_and_no_other(broker: Any) -> None:
    await broker.add_mesh("other", {"oscar": "member"})
    ada = broker.member("ada")

    assert (await ada.post("/v1/topics", {"mesh": "demo", "name": "mine"})).status == 201
    crossings = [
        await ada.post("/v1/topics", {"mesh": "other", "name": "mine"}),
        await ada.post("/v1/queues", {"mesh": "other", "name": "mine"}),
        await ada.post("/v1/members", {"mesh": "other", "name": "spy"}),
        await ada.delete("/v1/members/other/oscar"),
        await ada.post("/v1/members/other/oscar/token"),
        await ada.delete("/v1/topics/other/orders"),
        await ada.delete("/v1/queues/other/work"),
        await ada.post("/v1/topics/other/orders/subscriptions", {"member": "oscar"}),
        await ada.get("/v1/topics/other/orders/subscriptions"),
        await ada.delete("/v1/topics/other/orders/subscriptions/oscar"),
        await ada.get("/v1/topics", mesh="other"),
        await ada.get("/v1/members", mesh="other"),
        await ada.get("/v1/queues", mesh="other"),
        await ada.get("/v1/history", mesh="other"),
    ]
    assert {(answer.status, answer.code) for answer in crossings} == {(403, "other_mesh")}
    assert (await broker.admin.get("/v1/members", mesh="other")).body["members"][0]["name"] == "oscar"


async def test_dead_letters_are_for_admins_of_their_own_mesh(broker: Any) -> None:
    await broker.add_mesh("other")
    ada, path = broker.member("ada"), "/v1/dead_letters"
    for mesh, status in (("demo", 502), ("other", 403)):  # without NATS it is not known whether there is such a letter
        body = {"mesh": mesh, "reason": "x", "filter": {"ids": ["x"]}}
        answers = [
            await ada.get(f"{path}/{mesh}/x"),
            await ada.post(f"{path}/drop", body),
            await ada.post(f"{path}/replay", body),
        ]
        assert [answer.status for answer in answers] == [status] * 3
        for answer in (await ada.get(path, mesh=mesh), await ada.get(f"{path}/log", mesh=mesh)):
            assert answer.status == (200 if mesh == "demo" else 403)


async def test_a_member_manages_its_own_subscription_and_token_and_nobody_elses(broker: Any) -> None:
    alice = broker.member("alice")
    mine, bobs = "/v1/topics/demo/orders/subscriptions/alice", "/v1/topics/demo/orders/subscriptions/bob"

    assert (await alice.delete(mine)).status == 204
    assert (await alice.post("/v1/topics/demo/orders/subscriptions", {})).status == 201
    assert (await alice.delete(bobs)).status == 403
    assert (await alice.post("/v1/topics/demo/orders/subscriptions", {"member": "bob"})).status == 403
    assert (await alice.post("/v1/members/demo/bob/token")).status == 403
    assert (await alice.post("/v1/members/demo/alice/token")).status == 200


@pytest.mark.parametrize("scheme", ["Basic", "", "Bearer,"])
async def test_a_token_counts_only_as_a_bearer_token(broker: Any, scheme: str) -> None:
    alice = broker.member("alice")
    headers = {"Authorization": f"{scheme} {alice.token}"}
    async with broker.session.get(f"{broker.url}/v1/features", headers=headers) as answer:
        assert (answer.status, (await answer.json())["code"]) == (401, "missing_token")
        assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_two_tokens_are_none(broker: Any) -> None:
    alice = broker.member("alice")
    both = CIMultiDict([("Authorization", f"Bearer {alice.token}"), ("Authorization", "Bearer another")])
    async with broker.session.get(f"{broker.url}/v1/features", headers=both) as answer:
        assert (answer.status, (await answer.json())["code"]) == (401, "missing_token")


async def test_the_administrator_posts_nothing(broker: Any, message: Message) -> None:
    answer = await broker.admin.post("/v1/accept", {"messages": [message("id-1")]})

    assert (answer.status, answer.code) == (403, "not_a_member")


async def test_destinations_of_another_mesh_do_not_exist(broker: Any, message: Message) -> None:
    await broker.add_mesh("other", {"oscar": "member"})
    await broker.admin.post("/v1/topics", {"mesh": "other", "name": "theirs"})
    answers = await broker.member("alice").send(message("id-1", "dm:oscar"), message("id-2", "topic:theirs"))

    assert [answer.problem.code for answer in answers] == ["member_not_found", "topic_not_found"]


async def test_a_member_reads_what_it_sent_what_was_sent_to_it_and_its_topics(broker: Any, message: Message) -> None:
    alice, bob = broker.member("alice"), broker.member("bob")
    await broker.admin.delete("/v1/topics/demo/orders/subscriptions/bob")
    sent = await alice.send(message("topic"), message("to-bob", "dm:bob"), message("to-ada", "dm:ada"))

    async def visible(caller: Any) -> list[str]:
        page = (await caller.get("/v1/history", mesh="demo")).body
        return [entry["client_message_id"] for entry in page["messages"]]

    assert await visible(alice) == ["topic", "to-bob", "to-ada"]
    assert await visible(bob) == ["to-bob"]
    assert await visible(broker.member("ada")) == ["topic", "to-bob", "to-ada"]
    assert await visible(broker.admin) == ["topic", "to-bob", "to-ada"]
    seen = [(await bob.get(f"/v1/messages/{answer.broker_message_id}")).status for answer in sent]
    assert seen == [404, 200, 404]


async def test_a_message_of_another_mesh_is_nowhere_to_be_found(broker: Any, message: Message) -> None:
    await broker.add_mesh("other", {"oscar": "admin"})
    sent = await broker.member("alice").send_one(message("id-1"))
    oscar = broker.member("oscar", "other")

    assert (await oscar.get(f"/v1/messages/{sent.broker_message_id}")).status == 404
    assert (await oscar.get("/v1/history")).body["messages"] == []


async def test_a_revoked_token_is_worth_nothing_at_once(broker: Any, message: Message) -> None:
    alice = broker.member("alice")
    assert (await alice.send_one(message("id-1"))).status == 201
    await broker.admin.delete("/v1/members/demo/alice")

    assert (await alice.post("/v1/accept", {"messages": [message("id-1")]})).status == 401
    assert (await alice.get("/v1/history")).status == 401


async def test_a_revoked_token_writes_nothing_at_an_instance_that_remembers_it(
    broker: Any, message: Message, start_broker: Any
) -> None:
    async with start_broker(broker.services.config) as other:
        elsewhere = broker.member("alice").at(other.url)
        assert (await elsewhere.get("/v1/features")).status == 200
        await broker.admin.delete("/v1/members/demo/alice")

        assert (await elsewhere.post("/v1/accept", {"messages": [message("id-1")]})).status == 401


async def test_a_rotated_token_replaces_the_old_one(broker: Any) -> None:
    old = broker.member("alice")
    rotated = await broker.admin.post("/v1/members/demo/alice/token")
    broker.tokens["demo", "alice"] = rotated.body["token"]

    assert (await old.get("/v1/features")).status == 401
    assert (await broker.member("alice").get("/v1/features")).status == 200


async def test_a_member_has_two_tokens_while_its_programs_change_and_each_step_is_logged(
    broker: Any, message: Message, start_broker: Any
) -> None:
    old, path = broker.member("alice"), "/v1/members/demo/alice"
    issued = await broker.admin.post(f"{path}/token?keep_old=true")
    new = replace(old, token=issued.body["token"])
    assert [(await each.get("/v1/features")).status for each in (old, new)] == [200, 200]
    assert (await old.send_one(message("id-1"))).status == 201
    assert (await new.send_one(message("id-1"))).status == 200  # the same sender
    third = await broker.admin.post(f"{path}/token?keep_old=true")
    assert (third.status, third.body["code"]) == (409, "two_tokens")
    async with start_broker(broker.services.config) as other:
        assert (await old.at(other.url).get("/v1/features")).status == 200
        assert (await broker.admin.delete(f"{path}/old_token")).status == 204
        refused = await old.at(other.url).post("/v1/accept", {"messages": [message("id-2")]})
        assert refused.status == 401, "another broker remembers the token"
    assert [(await each.get("/v1/features")).status for each in (old, new)] == [401, 200]
    assert (await broker.admin.delete(f"{path}/old_token")).body["code"] == "no_old_token"
    lines = (await broker.admin.get("/v1/operator_log", noun="member")).body["lines"]
    assert [line["verb"] for line in lines][:2] == ["retire-token", "add-token"]


@pytest.mark.parametrize("step", ["rotate", "revoke"])
async def test_a_token_that_was_kept_ends_with_a_rotation_without_it_and_with_the_member(
    broker: Any, step: str
) -> None:
    old, path = broker.member("alice"), "/v1/members/demo/alice"
    new = replace(old, token=(await broker.admin.post(f"{path}/token?keep_old=true")).body["token"])
    if step == "rotate":
        assert (await broker.admin.post(f"{path}/token")).status == 200
    else:
        assert (await broker.admin.delete(path)).status == 204
    assert [(await each.get("/v1/features")).status for each in (old, new)] == [401, 401]


async def test_a_token_is_remembered_for_a_second_at_most(broker: Any) -> None:
    now = time.monotonic()
    authentication = Authentication(broker.services.database, None, monotonic=lambda: now)
    token = digest(broker.tokens["demo", "alice"])
    first = await authentication._look_up(token, remembered=True)
    assert await authentication._look_up(token, remembered=True) is first
    now += 1.0
    assert await authentication._look_up(token, remembered=True) is not first


async def test_the_database_keeps_no_token(broker: Any, postgres: Any) -> None:
    everything = str(await postgres.fetch("SELECT member::text FROM mesh.member"))

    assert broker.tokens["demo", "alice"] not in everything
    ann = await operator(broker, "ann", "look")
    assert ann.token not in str(await postgres.fetch("SELECT operator::text FROM mesh.operator"))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/accepted", b'{"messages":[%b'),
        ("/v1/dead_letters/drop", b'{"reason":"x","filter":{"ids":[%b'),
        ("/v1/jobs", b'{"mesh":"demo","flow":"f","first":"f","request":[%b'),
    ],
)
async def test_a_body_of_more_values_than_any_needs_is_not_even_decoded(broker: Any, path: str, body: bytes) -> None:
    endless = body % (b'"a",' * 110_000)  # decoded it would be a 400
    answer = await broker.member("ada").post(path, endless)
    assert (answer.status, answer.code) == (413, "request_too_large")
