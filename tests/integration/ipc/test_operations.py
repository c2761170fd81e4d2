"""The operator's routes, the relay's, the topics' and the control plane."""

from __future__ import annotations

from typing import Any

import pytest
from support.wire import encode, parse

from outbox import Outbox, OutboxSettings
from outbox.model import Caller, Settlement, Verdict
from postroom._wire.operations import VERBS
from postroom._wire.sends import RelayStatus

WHY = {"reason": "the receiver was down"}


async def send(room: Any, *ids: str) -> None:
    for identifier in ids:
        assert (await room.send({"to": "topic:orders", "body": identifier}, idempotency_key=identifier)).status == 202


async def kill(room: Any, *ids: str) -> None:
    """Let the broker refuse the sends for good."""
    await send(room, *ids)
    rows = await room.outbox.claim()
    await room.outbox.settle([Settlement(row.row_id, Verdict.DEAD, last_error="topic_not_found: no") for row in rows])


async def test_rows_are_listed_page_by_page_without_payloads(room: Any) -> None:
    await send(room, *"abcde")
    first = (await room.request("GET", "/v1/outbox?limit=3")).json
    second = (await room.request("GET", f"/v1/outbox?limit=3&cursor={first['next_cursor']}")).json
    assert [row["client_message_id"] for row in first["rows"] + second["rows"]] == list("abcde")
    assert not {"payload", "body"} & set(first["rows"][0])


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "status=x",
        "cursor=x",
        "older_than_seconds=-1",
        "before=2026-01-31T12:00:00",
        "before=0001-01-01T00:00:00%2B14:00",
        "held=x",
        "colour=red",
        "destination=orders",
    ],
)
async def test_a_query_out_of_its_rule_is_a_400(room: Any, query: str) -> None:
    assert (await room.request("GET", f"/v1/outbox?{query}")).status == 400


async def test_a_filter_by_what_is_no_destination_is_refused(room: Any) -> None:
    bulk = {**WHY, "filter": {"destination": "orders"}, "dry_run": True}
    for refused in (
        await room.request("GET", "/v1/outbox/export?destination=orders"),
        await room.request("GET", "/v1/inbox?destination=orders"),
        await room.request("GET", "/v1/events?destination=orders"),
        await room.request("POST", "/v1/outbox/hold", bulk),
    ):
        assert (refused.status, refused.json["code"], refused.json["field"]) == (
            400,
            "invalid_destination",
            "destination",
        )


async def test_an_export_streams_every_row(room: Any) -> None:
    await send(room, *"abc")
    reply = await room.request("GET", "/v1/outbox/export?status=pending")
    assert [row["client_message_id"] for row in reply.lines] == list("abc")
    for page in ("limit=1", "cursor=1"):  # it has none
        refused = await room.request("GET", f"/v1/outbox/export?{page}")
        assert (refused.status, refused.json["field"]) == (400, page.partition("=")[0])


async def test_a_dead_row_is_requeued_patched_and_its_chain_is_shown(room: Any) -> None:
    await kill(room, "k")
    message = {"to": "topic:orders_eu", "body": "better"}
    reply = await room.request(
        "POST", "/v1/outbox/k/requeue", {**WHY, "new_client_message_id": "k2", "message": message}
    )
    assert reply.status == 200
    assert (reply.json["client_message_id"], reply.json["status"]) == ("k2", "pending")
    chain = (await room.request("GET", "/v1/outbox/k")).json
    assert [row["status"] for row in chain["chain"]] == ["aborted", "pending"]
    assert chain["row"]["superseded_by"] == reply.json["id"]
    assert chain["log"][0]["reason"] == WHY["reason"]
    assert chain["log"][0]["actor"].startswith("uid ")
    (row,) = await room.outbox.claim()
    assert row.destination == "topic:orders_eu"


@pytest.mark.parametrize("patch", [{}, {"message": {"to": "topic:a"}}])
async def test_a_fresh_id_that_is_none_is_refused_by_its_name(room: Any, patch: dict[str, Any]) -> None:
    await send(room, "k")
    reply = await room.request("POST", "/v1/outbox/k/requeue", {**WHY, **patch, "new_client_message_id": "no id"})
    assert (reply.status, reply.json["field"]) == (400, "new_client_message_id")
    assert await room.rows() == 1


async def test_a_patch_brings_no_id_of_its_own(room: Any) -> None:
    await kill(room, "k")
    message = {"to": "topic:orders", "client_message_id": "mine"}
    reply = await room.request("POST", "/v1/outbox/k/requeue", {**WHY, "message": message})
    assert (reply.status, reply.json["field"]) == (400, "message.client_message_id")


@pytest.mark.parametrize("verb", ["abort", "hold", "flush"])
async def test_a_verb_on_one_row_answers_the_row(room: Any, verb: str) -> None:
    await send(room, "k")
    reply = await room.request("POST", f"/v1/outbox/k/{verb}", WHY)
    assert reply.status == 200
    assert reply.json["status"] == ("aborted" if verb == "abort" else "pending")
    assert reply.json.get("held", False) is (verb == "hold")


async def test_a_held_row_waits_for_its_release(room: Any) -> None:
    await send(room, "k")
    await room.request("POST", "/v1/outbox/k/hold", WHY)
    assert await room.outbox.claim() == []
    await room.request("POST", "/v1/outbox/k/release", WHY)
    assert len(await room.outbox.claim()) == 1


@pytest.mark.parametrize("verb", VERBS)
async def test_an_inflight_row_is_left_alone(room: Any, verb: str) -> None:
    await send(room, "k")
    await room.outbox.claim()
    reply = await room.request("POST", f"/v1/outbox/k/{verb}", WHY)
    assert (reply.status, reply.json["code"]) == (409, "wrong_state")


async def test_a_reason_that_is_too_long_is_refused_in_words(room: Any) -> None:
    reply = await room.request("POST", "/v1/relay/pause", {"reason": "x" * 1001})
    assert (reply.status, reply.json["detail"]) == (400, "reason: Expected at most 1000 characters")


@pytest.mark.parametrize("path", ["relay/pause", "relay/resume", "outbox/backup", "outbox/abort", "outbox/held/abort"])
@pytest.mark.parametrize("reason", ["\0", " \0", "so\0", "\n"])
async def test_a_reason_that_says_nothing_or_has_a_nul_is_refused(room: Any, path: str, reason: str) -> None:
    await send(room, "held")
    reply = await room.request("POST", f"/v1/{path}", {"reason": reason})
    assert (reply.status, reply.json["field"]) == (400, "reason")
    assert "not blank and has no NUL" in reply.json["detail"]


@pytest.mark.parametrize("body", [{}, {"reason": ""}, {"reason": "  "}, {"reason": 7}, {"reason": "x", "more": 1}])
async def test_a_verb_needs_a_reason(room: Any, body: dict[str, Any]) -> None:
    await send(room, "k")
    assert (await room.request("POST", "/v1/outbox/k/abort", body)).status == 400
    assert (await room.outbox.row("k")).status == "pending"


async def test_a_key_twice_in_a_verb_is_a_400(room: Any) -> None:
    await send(room, "k")
    reply = await room.request("POST", "/v1/outbox/k/abort", b'{"reason":"a","reason":"b"}')
    assert (reply.status, reply.json["code"]) == (400, "duplicate_key")


@pytest.mark.parametrize("identifier", ["unknown", "%", "'%20or%201=1", "a%00b", "*"])
async def test_a_row_that_is_not_there_is_a_404_or_no_id(room: Any, identifier: str) -> None:
    assert (await room.request("GET", f"/v1/outbox/{identifier}")).status in (400, 404)


async def test_many_are_requeued_at_once_after_a_dry_run(room: Any) -> None:
    await kill(room, *"abc")
    await send(room, "d")
    wanted = {"filter": {"status": "dead", "code": "topic_not_found"}, **WHY}
    dry = (await room.request("POST", "/v1/outbox/requeue", {**wanted, "dry_run": True})).json
    assert (dry["matched"], len(dry["done"]), dry["dry_run"]) == (3, 3, True)
    assert (await room.outbox.counts()).rows["dead"] == 3
    wet = (await room.request("POST", "/v1/outbox/requeue", wanted)).json
    assert len(wet["done"]) == 3
    counts = (await room.outbox.counts()).rows
    assert (counts["dead"], counts["aborted"], counts["pending"]) == (0, 3, 4)


async def test_many_by_id_tell_done_from_skipped_and_failed(room: Any) -> None:
    await send(room, "a", "b")
    await room.request("POST", "/v1/outbox/a/abort", WHY)
    reply = (await room.request("POST", "/v1/outbox/abort", {"filter": {"ids": ["a", "b", "nope"]}, **WHY})).json
    assert len(reply["done"]) == 1
    assert len(reply["skipped"]) == 1
    assert [failure["id"] for failure in reply["failed"]] == ["nope"]


async def test_a_prune_empties_old_payloads_and_keeps_the_rows(room: Any) -> None:
    await send(room, "a")
    await room.request("POST", "/v1/outbox/a/abort", WHY)
    reply = await room.request("POST", "/v1/outbox/prune", {"older_than_seconds": 3600, **WHY})
    assert reply.json == {"pruned": 0}
    assert (await room.send({"to": "topic:orders", "body": "a"}, idempotency_key="a")).status == 409


async def test_a_backup_is_an_sqlite_file_and_is_logged(room: Any) -> None:
    await send(room, "a")
    assert (await room.request("POST", "/v1/outbox/backup", {})).json["code"] == "invalid_field"
    reply = await room.request("POST", "/v1/outbox/backup", WHY)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/vnd.sqlite3")
    assert reply.body.startswith(b"SQLite format 3\0")
    assert len(reply.body) == int(reply.headers["content-length"])
    (line,) = (await room.request("GET", "/v1/operator_log")).json["lines"]
    assert (line["verb"], line["reason"]) == ("backup", WHY["reason"])


async def test_who_has_a_backup_whole_may_ask_for_the_next_at_once(room: Any) -> None:
    await send(room, "a")
    for _ in range(20):
        reader, writer = await room.connect()
        writer.write(encode("POST", "/v1/outbox/backup", WHY))
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readexactly(int(parse(head).headers["content-length"]))
        writer.close()


async def test_the_relay_is_paused_and_resumed_and_told_so(room: Any) -> None:
    assert (await room.request("POST", "/v1/relay/pause", WHY)).json["state"] == "relaying"
    assert (await room.outbox.relay_controls())[""].paused
    body = {**WHY, "destination": "topic:orders", "rate_per_second": 50}
    assert (await room.request("POST", "/v1/relay/resume", body)).status == 200
    assert (await room.outbox.relay_controls())["topic:orders"].rate_per_second == 50
    assert room.relay.changes == 2
    refused = await room.request("POST", "/v1/relay/pause", {**WHY, "destination": "*"})
    assert (refused.status, refused.json["field"]) == (400, "destination")


async def test_topics_are_passed_on(room: Any) -> None:
    assert (await room.request("GET", "/v1/topics")).json == {"topics": []}
    assert (await room.request("POST", "/v1/topics/orders/subscription")).status == 201
    assert (await room.request("DELETE", "/v1/topics/orders/subscription")).status == 204
    unknown = await room.request("POST", "/v1/topics/nope/subscription")
    assert (unknown.status, unknown.json["code"]) == (404, "topic_not_found")


async def test_health_says_what_is_wrong(room: Any) -> None:
    assert (await room.request("GET", "/v1/health")).json["status"] == "ok"
    room.relay.now = RelayStatus(state="waiting", degraded=True, reason="the broker refused the token")
    await send(room, "a")
    health = (await room.request("GET", "/v1/health")).json
    assert health["status"] == "degraded"
    assert "refused the token" in health["reasons"][0]
    assert health["rows"]["pending"] == 1
    assert health["oldest_pending_at"]


async def test_health_says_when_what_is_due_has_waited_for_too_long(open_room: Any) -> None:
    patient, hasty = await open_room(), await open_room(name="hasty", late_seconds=0.001)
    for room in (patient, hasty):
        room.relay.now = RelayStatus(state="paused")
        await send(room, "a")
    while (health := (await hasty.request("GET", "/v1/health")).json)["status"] == "ok":
        pass
    assert health["reasons"] == ["a message that is due has waited for 0 s: the relay is paused"]
    assert (await patient.request("GET", "/v1/health")).json["status"] == "ok"
    hasty.relay.now = RelayStatus(state="relaying", paused_destinations=["topic:a"])
    (reason,) = (await hasty.request("GET", "/v1/health")).json["reasons"]
    assert reason.endswith(": the relay is relaying, with 1 paused destination")


async def test_health_says_when_the_outbox_fills_up(open_room: Any) -> None:
    room = await open_room(settings=OutboxSettings(max_bytes=1024 * 1024))
    for number in range(9):
        sent = await room.send({"to": "topic:a", "body": "x" * 100_000})
        assert sent.status == 202, number
    health = (await room.request("GET", "/v1/health")).json
    assert [reason.partition(":")[0] for reason in health["reasons"]] == ["the outbox is nearly full of waiting rows"]
    assert (await room.send({"to": "topic:a", "body": "x" * 100_000})).json["code"] == "outbox_full"
    assert (await room.request("GET", "/v1/ready")).status == 200  # for a message that is not as large
    while (await room.send({"to": "dm:a"})).status == 202:
        pass
    ready = await room.request("GET", "/v1/ready")
    assert (ready.status, ready.json["code"]) == (503, "not_ready")
    assert "outbox.max_bytes" in ready.json["detail"]
    await room.request("POST", "/v1/outbox/abort", {**WHY, "filter": {}})
    assert (await room.request("GET", "/v1/health")).json["status"] == "ok"
    assert (await room.request("GET", "/v1/ready")).status == 200


async def test_health_and_ready_say_that_the_disk_is_full(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox, "disk_full", True)  # tests/integration/outbox/test_group_commit.py fills one
    why = "the disk is full, so new messages are refused: free some space"
    assert (await room.request("GET", "/v1/health")).json["reasons"] == [why]
    ready = await room.request("GET", "/v1/ready")
    assert (ready.status, ready.json["code"], ready.json["detail"]) == (503, "not_ready", why)


async def test_what_is_held_or_meant_for_later_is_not_late(open_room: Any) -> None:
    room = await open_room(late_seconds=0.001)
    await room.send({"to": "topic:a", "not_before": "2090-01-01T00:00:00Z"})
    await room.send({"to": "topic:a"}, idempotency_key="held")
    row = await room.outbox.row("held")
    await room.outbox.act("hold", row.id, caller=Caller(0, 0), reason="test")
    assert (await room.outbox.counts()).due_ms == 0
    (claimed,) = [await room.outbox.act("release", row.id, caller=Caller(0, 0), reason="test")]
    assert claimed.status == "pending"
    await room.outbox.claim()  # what is inflight has waited as well
    while not (await room.outbox.counts()).due_ms:
        pass


async def test_ready_does_not_depend_on_the_broker_but_on_the_outbox(room: Any) -> None:
    room.relay.now = RelayStatus(state="waiting", degraded=True, reason="away")
    assert (await room.request("GET", "/v1/ready")).status == 200
    await room.outbox.close()
    reply = await room.request("GET", "/v1/ready")
    assert (reply.status, reply.json["code"]) == (503, "not_ready")
    refused = await room.send({"to": "topic:a"})
    assert (refused.status, refused.json["retryable"]) == (503, True)


async def test_version_names_the_program_and_its_mesh(room: Any) -> None:
    assert (await room.request("GET", "/v1/version")).json == {"name": "postroomd", "version": "0.0.0", "mesh": "demo"}
