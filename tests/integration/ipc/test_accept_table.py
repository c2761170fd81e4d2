"""Every cell of the accept table (docs/contract/send.md#send-37), over HTTP, on real SQLite, by both routes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from outbox.model import Caller, Settlement, Verdict
from postroom._wire.fingerprint import prefix
from postroom._wire.message import prepare

FIRST = {"to": "topic:orders", "body": "hello", "client_message_id": "k"}
OTHER = {**FIRST, "body": "another"}
STATES = ("pending", "inflight", "done", "dead", "aborted")
REASON = "topic_not_found: there is no such topic"

CELLS = [
    # state, same content?, status, what the answer says
    ("pending", True, 202, {"status": "queued"}),
    ("pending", False, 409, {"conflict": "outbox_pending_fingerprint_mismatch"}),
    ("inflight", True, 202, {"status": "inflight"}),
    ("inflight", False, 409, {"conflict": "outbox_inflight_fingerprint_mismatch"}),
    ("done", True, 200, {"status": "done", "duplicate": True, "broker_message_id": "B1", "history_id": 7}),
    ("done", False, 409, {"conflict": "outbox_done_fingerprint_mismatch", "broker_message_id": "B1"}),
    ("dead", True, 409, {"conflict": "outbox_dead_fingerprint_match", "reason": REASON}),
    ("dead", False, 409, {"conflict": "outbox_dead_fingerprint_mismatch"}),
    ("aborted", True, 409, {"conflict": "outbox_aborted_fingerprint_match"}),
    ("aborted", False, 409, {"conflict": "outbox_aborted_fingerprint_mismatch"}),
]


async def bring(room: Any, state: str) -> None:
    """Move the only row to `state`, as the relay or an operator would."""
    row = await room.outbox.row("k")
    if state in ("inflight", "done", "dead"):
        await room.outbox.claim()
    if state == "done":
        await room.outbox.settle([Settlement(row.id, Verdict.DONE, broker_message_id="B1", history_id=7)])
    if state == "dead":
        await room.outbox.settle([Settlement(row.id, Verdict.DEAD, last_error=REASON)])
    if state == "aborted":
        await room.outbox.act("abort", row.id, caller=Caller(0, 0), reason="test")


@pytest.mark.parametrize(("state", "same", "status", "says"), CELLS)
@pytest.mark.parametrize("route", ["single", "batch"])
async def test_a_repeated_id_is_answered_by_the_table(
    room: Any, *, route: str, state: str, same: bool, status: int, says: dict[str, Any]
) -> None:
    assert (await room.send(FIRST)).status == 202
    await bring(room, state)
    message = FIRST if same else OTHER
    if route == "single":
        reply = await room.send(message)
        answered, got = reply.json, reply.status
        assert (reply.headers.get("idempotent-replayed") == "true") == (status < 300)
        assert (reply.headers.get("location") == "/v1/sends/k") == (status == 202)
    else:
        (line,) = (await room.batch(message)).lines
        answered = line.get("result") or line["problem"]
        got = answered.get("status") if "problem" in line else status
    assert got == status
    assert {name: answered.get(name) for name in says} == says
    if status == 409:
        assert answered["code"] == "idempotency_key_reused"
        assert answered["destination"] == "topic:orders"
        assert answered["since"].endswith("Z")
        assert answered["request_fingerprint"] == prefix(prepare(_json(message)).fingerprint)
        assert "broker_message_id" not in answered or "broker_message_id" in says
        assert "reason" not in answered or "reason" in says
    assert await room.rows() == 1


def _json(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("same", [True, False])
async def test_the_id_of_another_uid_tells_nothing(room: Any, *, state: str, same: bool) -> None:
    await room.outbox.accept([prepare(_json(FIRST))], Caller(54321, 54321))
    await bring(room, state)
    reply = await room.send(FIRST if same else OTHER)
    assert reply.status == 409
    assert set(reply.json) == {
        "type",
        "title",
        "status",
        "detail",
        "code",
        "retryable",
        "conflict",
        "request_fingerprint",
    }
    assert reply.json["conflict"] == "outbox_id_of_another_caller"
    assert state not in reply.body.decode()


async def test_a_fresh_send_is_queued_and_says_where_to_look(room: Any) -> None:
    reply = await room.send(FIRST)
    assert reply.status == 202
    assert reply.headers["location"] == "/v1/sends/k"
    assert "idempotent-replayed" not in reply.headers
    assert reply.json == {"client_message_id": "k", "outbox_id": reply.json["outbox_id"], "status": "queued"}


async def test_of_32_posts_at_once_with_one_id_one_content_wins(room: Any) -> None:
    replies = await asyncio.gather(*(room.send(FIRST if n % 2 else OTHER) for n in range(32)))
    statuses = sorted(reply.status for reply in replies)
    assert statuses == [202] * 16 + [409] * 16
    assert sum("idempotent-replayed" not in reply.headers for reply in replies if reply.status == 202) == 1
    assert {reply.json["outbox_id"] for reply in replies if reply.status == 202} == {(await room.outbox.row("k")).id}
    assert await room.rows() == 1


async def test_one_id_twice_in_a_batch_fares_as_one_after_the_other(room: Any) -> None:
    first, second, third = (await room.batch(FIRST, OTHER, FIRST)).lines
    assert first["result"]["status"] == "queued"
    assert second["problem"]["conflict"] == "outbox_pending_fingerprint_mismatch"
    assert third["result"]["outbox_id"] == first["result"]["outbox_id"]
