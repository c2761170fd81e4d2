"""Meshes, members, topics, subscriptions and queues come and go (docs/contract/accept.md#accept-4)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest
from support.nats_users import NatsWithUsers
from yarl import URL

from broker.config import BrokerConfig
from broker.operator import BRIEFLY, Nats
from cli.installation import _ANSWER_SECONDS
from postroom._wire.dead_letters import DeadLetter
from postroom.delivery.settings import NatsSettings

Message = Callable[..., dict[str, Any]]


async def test_what_is_created_is_listed_and_what_is_deleted_is_gone(broker: Any) -> None:
    admin = broker.admin
    for noun, name in (("topics", "news"), ("queues", "render.fast")):
        assert (await admin.post(f"/v1/{noun}", {"mesh": "demo", "name": name})).status == 201
        listed = (await admin.get(f"/v1/{noun}", mesh="demo")).body[noun]
        assert name in [entry["name"] for entry in listed]
        assert (await admin.delete(f"/v1/{noun}/demo/{name}")).status == 204
        assert (await admin.delete(f"/v1/{noun}/demo/{name}")).status == 404


async def test_an_overview_says_that_jetstream_is_silent_before_a_status_gives_up(
    migrated: BrokerConfig, start_broker: Any, tmp_path: Path
) -> None:
    """As it is for seconds after a cluster has lost its majority; here NATS answers nothing to what it denies."""
    server = NatsWithUsers(tmp_path / "nats", {"silent": (["nothing"], [">"])})
    server.start()
    silent = NatsSettings(url=server.url_of("silent"))
    try:
        async with start_broker(msgspec.structs.replace(migrated, nats=silent)) as broker:
            counts, consumers = await asyncio.gather(
                broker.admin.get("/v1/dead_letters/counts"), broker.admin.get("/v1/consumers")
            )
        async with Nats(silent).opened(BRIEFLY) as (js, _):
            assert js is not None
            assert BRIEFLY + js._timeout < _ANSWER_SECONDS
    finally:
        server.stop()
    for answer in (counts, consumers):
        assert (answer.status, answer.body["unread"]["code"]) == (200, "nats_refused")


async def test_a_name_is_given_once(broker: Any) -> None:
    again = [
        await broker.admin.post("/v1/meshes", {"slug": "demo"}),
        await broker.admin.post("/v1/members", {"mesh": "demo", "name": "alice"}),
        await broker.admin.post("/v1/topics", {"mesh": "demo", "name": "orders"}),
        await broker.admin.post("/v1/queues", {"mesh": "demo", "name": "work"}),
    ]

    assert [(answer.status, answer.code) for answer in again] == [
        (409, "mesh_exists"),
        (409, "member_exists"),
        (409, "topic_exists"),
        (409, "queue_exists"),
    ]


async def test_a_key_given_twice_is_refused_by_name(broker: Any) -> None:
    answer = await broker.admin.post("/v1/topics", b'{"mesh":"demo","name":"seen","name":"unseen"}')
    assert (answer.status, answer.code) == (400, "duplicate_key")
    assert "'name'" in answer.body["detail"]
    twice = b'{"filter":{"keys":[{"tenant":"a","tenant":"b","topic":"t","key":"k"}]},"reason":"so"}'
    assert (await broker.admin.post("/v1/once/forget", twice)).code == "duplicate_key"


async def test_an_expectation_is_met_or_refused_as_a_problem(broker: Any) -> None:
    url, bearer = broker.url + "/v1/whoami", {"Authorization": f"Bearer {broker.admin.token}"}
    for expectation, status in (("100-continue", 200), ("more", 417)):
        async with broker.admin.session.get(url, headers=bearer | {"Expect": expectation}) as answer:
            assert answer.status == status
            said = await answer.json(content_type=None)
    assert said["code"] == "expectation_failed"


async def test_a_revoked_members_name_is_never_given_again(broker: Any) -> None:
    assert (await broker.admin.delete("/v1/members/demo/bob")).status == 204

    assert (await broker.admin.delete("/v1/members/demo/bob")).status == 404
    assert (await broker.admin.post("/v1/members", {"mesh": "demo", "name": "bob"})).status == 409
    assert (await broker.admin.post("/v1/members/demo/bob/token")).status == 404
    listed = (await broker.admin.get("/v1/members", mesh="demo")).body["members"]
    assert [(entry["name"], "revoked_at" in entry) for entry in listed] == [
        ("ada", False),
        ("alice", False),
        ("bob", True),
    ]


async def test_an_empty_mesh_goes_with_all_it_has_and_one_with_messages_stays(broker: Any, message: Message) -> None:
    await broker.add_mesh("empty")
    await broker.member("alice").send_one(message("id-1"))

    assert (await broker.admin.delete("/v1/meshes/empty")).status == 204
    full = await broker.admin.delete("/v1/meshes/demo")
    assert (full.status, full.code) == (409, "mesh_holds_messages")
    assert [mesh["slug"] for mesh in (await broker.admin.get("/v1/meshes")).body["meshes"]] == ["demo"]
    assert (await broker.member("alice", "empty").get("/v1/features")).status == 401


async def test_a_member_that_asks_while_its_mesh_is_deleted_is_answered(
    broker: Any, postgres: asyncpg.Connection[asyncpg.Record], waiting_for_lock: Callable[[int], Awaitable[None]]
) -> None:
    await broker.add_mesh("empty")
    async with postgres.transaction():
        await postgres.execute("DELETE FROM mesh.mesh WHERE slug = 'empty'")
        asked = asyncio.create_task(broker.member("alice", "empty").get("/v1/features"))
        await waiting_for_lock(1)
    features = await asked
    assert (features.status, features.body["last_history_id"]) == (200, None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/topics", {"mesh": "empty", "name": "news"}),
        ("/v1/members", {"mesh": "empty", "name": "bob"}),
        ("/v1/operators", {"mesh": "empty", "name": "looker", "role": "look"}),
        ("/v1/topics/empty/orders/subscriptions", {"member": "alice"}),
    ],
    ids=lambda given: given.rpartition("/")[2] if isinstance(given, str) else "",
)
async def test_a_change_of_a_mesh_that_is_deleted_at_that_moment_finds_none(
    broker: Any,
    postgres: asyncpg.Connection[asyncpg.Record],
    waiting_for_lock: Callable[[int], Awaitable[None]],
    path: str,
    body: dict[str, str],
) -> None:
    await broker.add_mesh("empty")
    async with postgres.transaction():
        await postgres.execute("DELETE FROM mesh.mesh WHERE slug = 'empty'")
        asked = asyncio.create_task(broker.admin.post(path, body))
        await waiting_for_lock(1)
    answer = await asked
    assert (answer.status, answer.code) == (404, "mesh_not_found")


async def test_a_mesh_is_deleted_while_an_accept_has_its_numbers(
    broker: Any, postgres: asyncpg.Connection[asyncpg.Record], waiting_for_lock: Callable[[int], Awaitable[None]]
) -> None:
    await broker.add_mesh("empty")
    mesh = await postgres.fetchval("SELECT id FROM mesh.mesh WHERE slug = 'empty'")
    async with postgres.transaction():
        await postgres.execute("SELECT mesh.take_history_ids($1, 1)", mesh)
        asked = asyncio.create_task(broker.admin.delete("/v1/meshes/empty"))
        await waiting_for_lock(1)
        await postgres.execute("SELECT FROM mesh.mesh WHERE id = $1 FOR KEY SHARE", mesh)
    assert (await asked).status == 204


async def test_a_mesh_whose_dead_letters_or_jobs_a_new_one_of_its_name_would_have_stays(
    broker: Any, postgres: asyncpg.Connection[asyncpg.Record]
) -> None:
    await broker.add_mesh("left")
    job = {"id": str(uuid4()), "mesh": "left", "flow": "f", "first": "a", "request": 1}
    assert (await broker.admin.post("/v1/jobs", job)).status == 201
    await postgres.execute(
        "INSERT INTO postroom.dead_letters (context, letter_id, subject, died_at, letter, payload) "
        "VALUES ('left', 'one', 'left.dlq.m', now(), $1, '1')",
        msgspec.json.encode(
            DeadLetter(message_id="one", original_subject="m", reason="poison", attempts=1, consumer="billing")
        ),
    )

    refused = await broker.admin.delete("/v1/meshes/left")
    assert (refused.status, refused.code) == (409, "mesh_holds_letters")
    await postgres.execute("DELETE FROM postroom.dead_letters")
    await postgres.execute(
        "INSERT INTO postroom.replays (context, message_id, subject, headers, payload)"
        " VALUES ('left', 'one~billing.1', 'm', '{}', '1')"
    )
    refused = await broker.admin.delete("/v1/meshes/left")
    assert (refused.status, refused.code) == (409, "mesh_holds_letters")
    assert "worker replays list --mesh left" in refused.body["detail"]
    await postgres.execute(
        "UPDATE postroom.replays SET published_at = now(), stream = 'S', stream_created_at = now(), stream_sequence = 1"
    )
    refused = await broker.admin.delete("/v1/meshes/left")
    assert (refused.status, refused.code) == (409, "mesh_holds_jobs")
    assert [mesh["slug"] for mesh in (await broker.admin.get("/v1/meshes")).body["meshes"]] == ["demo", "left"]
    await postgres.execute("TRUNCATE ledger.job CASCADE")
    await postgres.execute("SELECT postroom.emit('left', 'order', '7', 'placed', '{}')")
    refused = await broker.admin.delete("/v1/meshes/left")
    assert (refused.status, refused.code) == (409, "mesh_holds_messages")
    assert "worker events list --mesh left" in refused.body["detail"]
    await postgres.execute(
        "UPDATE postroom.outbox_events SET published_at = now(), stream = 'S', stream_created_at = now(),"
        " stream_sequence = position"
    )
    assert (await broker.admin.delete("/v1/meshes/left")).status == 204
    assert not await postgres.fetchval("SELECT count(*) FROM postroom.replays")
    assert not await postgres.fetchval("SELECT count(*) FROM postroom.outbox_events")


async def test_subscribing_twice_is_subscribing_once(broker: Any) -> None:
    path = "/v1/topics/demo/orders/subscriptions"

    assert (await broker.admin.post(path, {"member": "alice"})).status == 200
    subscribed = (await broker.member("alice").get(path)).body["subscriptions"]
    assert [entry["member"] for entry in subscribed] == ["ada", "alice", "bob"]
    assert (await broker.admin.delete(f"{path}/alice")).status == 204
    assert (await broker.admin.delete(f"{path}/alice")).status == 404
    assert (await broker.admin.get("/v1/topics", mesh="demo")).body["topics"][0]["subscribers"] == 2


NO_NAMES: list[tuple[str, Any]] = [
    ("/v1/meshes", {"slug": "Upper"}),
    ("/v1/meshes", {"slug": "a" * 65}),
    ("/v1/meshes", {"slug": "with-dash"}),
    ("/v1/meshes", {"slug": "cmd"}),
    ("/v1/meshes", {"slug": "demo2", "unknown": 1}),
    ("/v1/meshes", []),
    ("/v1/members", {"mesh": "demo", "name": "carol", "role": "owner"}),
    ("/v1/members", {"mesh": "demo", "name": "dm:carol"}),
    ("/v1/topics", {"mesh": "demo", "name": "a.b"}),
    ("/v1/topics", {"mesh": "demo", "name": "a\n"}),
    ("/v1/queues", {"mesh": "demo", "name": "a.b.c.d.e"}),
    ("/v1/queues", {"mesh": "demo", "name": ""}),
    ("/v1/topics/demo/orders/subscriptions", {"member": "*"}),
]


async def test_what_cannot_be_a_name_is_refused(broker: Any) -> None:
    for path, body in NO_NAMES:
        answer = await broker.admin.post(path, body)
        assert (answer.status, answer.code) == (400, "invalid_request"), body
        assert "regex" not in answer.body["detail"], body


LISTS = (
    "consumers", "jobs", "operator_log", "programs", "sources", "unpublished/events", "unpublished/deliveries",
    "dead_letters", "dead_letters/causes", "dead_letters/log",
)  # fmt: skip


async def test_what_is_not_there_is_not_found(broker: Any) -> None:
    admin = broker.admin
    answers = {
        "mesh_not_found": [
            await admin.post("/v1/topics", {"mesh": "nowhere", "name": "orders"}),
            await admin.get("/v1/history", mesh="nowhere"),
            await admin.get("/v1/topics", mesh="' or 1=1"),
            await admin.delete("/v1/meshes/nowhere"),
            *[await admin.get(f"/v1/{things}", mesh="nowhere") for things in LISTS],
            await admin.get("/v1/dead_letters/nowhere/1"),
            await admin.post("/v1/dead_letters/drop", {"mesh": "nowhere", "reason": "x", "filter": {}}),
            await admin.post("/v1/unpublished/events/drop", {"mesh": "nowhere", "reason": "x", "filter": {}}),
            await admin.post(
                "/v1/jobs", {"id": str(uuid4()), "mesh": "nowhere", "flow": "f", "first": "a", "request": 1}
            ),
        ],
        "topic_not_found": [await admin.post("/v1/topics/demo/nothing/subscriptions", {"member": "alice"})],
        "member_not_found": [await admin.post("/v1/topics/demo/orders/subscriptions", {"member": "nobody"})],
    }

    for code, found in answers.items():
        assert {(answer.status, answer.code) for answer in found} == {(404, code)}


async def test_a_context_that_a_worker_declares_a_stream_for_needs_no_mesh(broker: Any, postgres: Any) -> None:
    await postgres.execute("INSERT INTO postroom.declared_subjects VALUES ('shop.event.>', '^shop[.]event[.].+$')")
    try:
        assert (await broker.admin.get("/v1/sources", mesh="shop")).status == 200
        assert (await broker.admin.get("/v1/unpublished/events", mesh="shop")).body == {"failing": []}
    finally:
        await postgres.execute("DELETE FROM postroom.declared_subjects")


async def test_a_name_of_strange_characters_is_refused_or_not_found(broker: Any) -> None:
    strange = {"%00": 400, "%ED%A0%80": 404, "%FF": 404, "*": 404, "%3E": 404, "..%2F": 404, "%27%3B--": 404}

    for name, status in strange.items():
        for path in (f"/v1/topics/demo/{name}", f"/v1/queues/demo/{name}", f"/v1/members/demo/{name}"):
            url = URL(broker.url + path, encoded=True)
            headers = {"Authorization": f"Bearer {broker.admin.token}"}
            async with broker.session.delete(url, headers=headers) as answer:
                assert answer.status == status, path


async def test_the_administrator_must_say_which_mesh_and_whom(broker: Any) -> None:
    assert (await broker.admin.get("/v1/topics")).code == "mesh_required"
    assert (await broker.admin.post("/v1/topics/demo/orders/subscriptions", {})).code == "member_required"


async def test_a_member_need_not_name_its_mesh(broker: Any) -> None:
    alice = broker.member("alice")

    assert [topic["name"] for topic in (await alice.get("/v1/topics")).body["topics"]] == ["orders"]
    assert len((await alice.get("/v1/members")).body["members"]) == 3


async def test_what_is_administered_leaves_who_and_what_by_the_token(broker: Any, postgres: Any) -> None:
    begun = await postgres.fetchval("SELECT coalesce(max(id), 0) FROM mesh.operator_log")
    await broker.admin.post("/v1/topics", {"mesh": "demo", "name": "news"})
    await broker.member("alice").post("/v1/topics/demo/news/subscriptions", {})
    await broker.member("alice").delete("/v1/topics/demo/news/subscriptions/alice")
    await broker.admin.delete("/v1/topics/demo/news")
    await broker.admin.delete("/v1/topics/demo/news")  # is not there: nothing was done
    rows = await postgres.fetch("SELECT actor, verb, noun, key FROM mesh.operator_log WHERE id > $1 ORDER BY id", begun)
    assert [tuple(row) for row in rows] == [
        ("administrator", "create", "topic", "demo news"),
        ("alice of demo", "subscribe", "topic", "demo news alice"),
        ("alice of demo", "unsubscribe", "topic", "demo news alice"),
        ("administrator", "delete", "topic", "demo news"),
    ]
    with pytest.raises(asyncpg.PostgresError):
        await postgres.execute("UPDATE mesh.operator_log SET actor = 'nobody'")


async def test_what_cannot_be_logged_is_not_done(broker: Any, postgres: Any) -> None:
    await postgres.execute("ALTER TABLE mesh.operator_log ADD CONSTRAINT no_more CHECK (key <> 'demo news') NOT VALID")
    try:
        assert (await broker.admin.post("/v1/topics", {"mesh": "demo", "name": "news"})).status == 500
    finally:
        await postgres.execute("ALTER TABLE mesh.operator_log DROP CONSTRAINT no_more")
    assert "news" not in [topic["name"] for topic in (await broker.admin.get("/v1/topics", mesh="demo")).body["topics"]]


async def test_a_mesh_that_would_narrow_nothing_is_refused(broker: Any) -> None:
    for path, wanted in (
        ("/v1/sources/redrive", {"since": "2026-01-01T00:00:00Z"}),
        ("/v1/once/forget", {"keys": [{"tenant": "t", "topic": "t", "key": "k"}]}),
    ):
        asked = {"mesh": "demo", "reason": "x", "filter": wanted}
        answer = await broker.admin.post(path, asked)
        assert (answer.status, answer.code, answer.body.get("field")) == (400, "invalid_request", "mesh"), path


async def test_a_parameter_that_a_route_does_not_take_is_refused_and_nothing_is_done(broker: Any) -> None:
    """A `dry_run` that is not looked at would be done."""
    admin = broker.admin
    assert (await admin.post("/v1/queues", {"mesh": "demo", "name": "kept"})).status == 201
    for ask in (admin.delete("/v1/queues/demo/kept?dry_run=true"), admin.get("/v1/meshes", limit=1)):
        answer = await ask
        assert (answer.status, answer.code) == (400, "invalid_query")
    token = "/v1/members/demo/bob/token"
    for method, path in (("DELETE", "/v1/queues/demo/kept"), ("GET", "/v1/queues"), ("POST", token)):
        answer = await admin.call(method, path, {"dry_run": True})
        assert (answer.status, answer.code) == (400, "bad_request")
        assert "takes no body" in answer.body["detail"]
    assert (await admin.call("GET", "/v1/meshes", {})).status == 200
    assert "kept" in [each["name"] for each in (await admin.get("/v1/queues", mesh="demo")).body["queues"]]
