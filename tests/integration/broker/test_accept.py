"""The phases of accept, message by message (docs/contract/accept.md#accept-9)."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

Message = Callable[..., dict[str, Any]]
Counts = Callable[[], Awaitable[dict[str, int]]]


async def test_an_accepted_topic_message_has_all_its_rows(broker: Any, message: Message, counts: Counts) -> None:
    answer = await broker.member("alice").send_one(message("id-1", mentions=["bob", "carol"]))

    assert (answer.status, answer.duplicate, answer.history_id) == (201, False, 1)
    assert await counts() == {
        "client_message_dedupe": 1,
        "topic_message": 1,
        "message_queue": 0,
        "message_history": 1,
        "delivery_queue": 3,  # alice, bob and ada are subscribed
        "mention_index": 2,
        "outbox_events": 1,
    }


async def test_a_dm_is_delivered_to_its_recipient_and_announced_to_nobody(
    broker: Any, message: Message, counts: Counts, postgres: Any
) -> None:
    assert (await broker.member("alice").send_one(message("id-1", "dm:bob"))).status == 201

    rows = await counts()
    assert (rows["message_queue"], rows["delivery_queue"], rows["outbox_events"]) == (1, 1, 0)
    recipient = await postgres.fetchval(
        "SELECT name FROM mesh.delivery_queue JOIN mesh.member ON member.id = recipient_id"
    )
    assert recipient == "bob"


async def test_a_queue_message_becomes_a_command_and_has_no_recipient(
    broker: Any, message: Message, counts: Counts, postgres: Any
) -> None:
    assert (await broker.member("alice").send_one(message("id-1", "queue:work"))).status == 201

    rows = await counts()
    assert (rows["message_queue"], rows["delivery_queue"], rows["outbox_events"]) == (1, 0, 1)
    event = await postgres.fetchrow("SELECT aggregate_type, subject FROM postroom.outbox_events")
    assert tuple(event) == ("queue", "cmd.demo.default.work.run")


async def test_a_topic_message_becomes_an_event_named_like_the_topic(
    broker: Any, message: Message, postgres: Any
) -> None:
    correlation = "5f0c9a3e-6f2b-4a57-9d55-0f3a3c1f7b11"
    meta = {"event_version": 3, "correlation_id": correlation, "causation_id": "not a uuid"}
    answer = await broker.member("alice").send_one(message("id-1", body="caf\u00e9", meta=meta))

    event = await postgres.fetchrow("SELECT * FROM postroom.outbox_events")
    assert (event["event_type"], event["event_version"]) == ("orders", 3)
    assert (event["aggregate_type"], event["aggregate_id"]) == ("topic", "demo/topic:orders")
    assert event["subject"] == "demo.event.orders.v3"
    assert str(event["id"]) == answer.broker_message_id
    assert (str(event["correlation_id"]), event["causation_id"]) == (correlation, None)
    payload = json.loads(event["payload"])
    assert payload == {
        "broker_message_id": answer.broker_message_id,
        "client_message_id": "id-1",
        "mesh": "demo",
        "sender": "alice",
        "message": {"to": "topic:orders", "body": "caf\u00e9", "meta": meta},
    }


async def test_a_retry_is_a_duplicate_with_the_first_answers_ids(broker: Any, message: Message) -> None:
    alice = broker.member("alice")
    first = await alice.send_one(message("id-1"))
    again = await alice.send_one(message("id-1"))

    assert (again.status, again.duplicate, again.history_available) == (200, True, True)
    assert (again.broker_message_id, again.history_id) == (first.broker_message_id, first.history_id)
    assert again.first_seen_at is not None


async def test_an_id_with_other_content_is_a_conflict_that_shows_a_prefix_only(broker: Any, message: Message) -> None:
    first = message("id-1", body="one")
    await broker.member("alice").send_one(first)
    answer = await broker.member("alice").send_one(message("id-1", body="two"))

    assert answer.status == 409
    assert answer.problem.conflict == "request_fingerprint_mismatch"
    assert answer.problem.broker_fingerprint_prefix == first["request_fingerprint"][:16]
    assert answer.broker_message_id is None


async def test_ids_belong_to_a_mesh_not_to_the_broker(broker: Any, message: Message) -> None:
    await broker.add_mesh("other")

    assert (await broker.member("alice").send_one(message("id-1", body="one"))).status == 201
    assert (await broker.member("alice", "other").send_one(message("id-1", body="two"))).status == 201


@pytest.mark.parametrize("body", ["one", "two"])
async def test_an_id_belongs_to_the_member_who_used_it_first(
    broker: Any, message: Message, counts: Counts, body: str
) -> None:
    first = await broker.member("alice").send_one(message("id-1", body="one"))
    before = await counts()
    answer = await broker.member("bob").send_one(message("id-1", body=body))

    assert (answer.status, answer.problem.code) == (409, "idempotency_key_reused")
    assert answer.problem.conflict == "id_of_another_member"
    shown = msgspec.json.encode(answer)
    told = (
        first.broker_message_id,
        "history_id",
        "first_seen_at",
        message("id-1", body="one")["request_fingerprint"][:16],
    )
    assert not [each for each in told if each.encode() in shown]
    assert await counts() == before


async def test_a_tombstone_still_belongs_to_its_sender(
    broker: Any, message: Message, tamper: Callable[[str], Awaitable[None]]
) -> None:
    await broker.member("alice").send_one(message("id-1"))
    await tamper("UPDATE mesh.client_message_dedupe SET history_available = false")

    assert (await broker.member("bob").send_one(message("id-1"))).problem.conflict == "id_of_another_member"
    assert (await broker.member("alice").send_one(message("id-1"))).status == 200


async def test_a_member_is_the_same_sender_wherever_it_posts_from_and_with_whichever_token(
    broker: Any, message: Message, start_broker: Any
) -> None:
    alice = broker.member("alice")
    await alice.send_one(message("id-1"))
    async with start_broker(broker.services.config) as other:
        assert (await alice.at(other.url).send_one(message("id-1"))).status == 200
    rotated = await broker.admin.post("/v1/members/demo/alice/token")
    assert (await replace(alice, token=rotated.body["token"]).send_one(message("id-1"))).status == 200


REFUSED = {
    "topic:nothing": (404, "topic_not_found"),
    "topic:closed": (403, "not_subscribed"),
    "dm:nobody": (404, "member_not_found"),
    "queue:nothing": (404, "queue_not_found"),
}


async def test_a_refused_destination_leaves_nothing_and_the_id_free(
    broker: Any, message: Message, counts: Counts
) -> None:
    alice = broker.member("alice")
    await broker.admin.post("/v1/topics", {"mesh": "demo", "name": "closed"})
    answers = await alice.send(*(message(f"id-{n}", to) for n, to in enumerate(REFUSED)))

    assert [(answer.status, answer.problem.code) for answer in answers] == list(REFUSED.values())
    assert not any(answer.problem.retryable for answer in answers)
    assert not any((await counts()).values())
    assert broker.metric("postroom_broker_rate_limit_consumed_then_rejected_total") == len(REFUSED)
    assert {answer.status for answer in await alice.send(*(message(f"id-{n}") for n in range(4)))} == {201}


async def test_a_revoked_member_is_no_recipient(broker: Any, message: Message, counts: Counts) -> None:
    await broker.admin.delete("/v1/members/demo/bob")

    assert (await broker.member("alice").send_one(message("id-1", "dm:bob"))).status == 404
    assert (await broker.member("alice").send_one(message("id-2"))).status == 201
    assert (await counts())["delivery_queue"] == 2


async def test_a_retry_is_answered_even_when_its_topic_is_gone(broker: Any, message: Message) -> None:
    await broker.member("alice").send_one(message("id-1"))
    await broker.admin.delete("/v1/topics/demo/orders")

    assert (await broker.member("alice").send_one(message("id-1"))).status == 200
    assert (await broker.member("alice").send_one(message("id-2"))).status == 404


async def test_a_retry_is_answered_before_its_message_is_looked_at(broker: Any, message: Message) -> None:
    item = message("id-1")
    await broker.member("alice").send_one(item)
    spoilt = {**item, "message": {"to": "no destination", "unknown": True}}

    assert (await broker.member("alice").send_one(spoilt)).status == 200


async def test_meta_and_body_come_out_as_they_went_in(broker: Any, message: Message) -> None:
    alice = broker.member("alice")
    numbers = {"big": 2**53 - 1, "tiny": 5e-324, "huge": [1.5e300, 2.0**60]}
    meta = {"\u20ac": [1, 2.5, None, True, {"deep": "\U0001f4ee"}], **numbers}
    text = await alice.send_one(message("id-1", body='"quoted"\n\u2028', meta=meta))
    raw = await alice.send_one(message("id-2", body=None, body_base64="AAEC/w=="))

    first = (await alice.get(f"/v1/messages/{text.broker_message_id}")).body
    assert (first["body"], first["meta"]) == ('"quoted"\n\u2028', meta)
    assert (await alice.send_one(message("id-3", meta=first["meta"]))).status == 201
    second = (await alice.get(f"/v1/messages/{raw.broker_message_id}")).body
    assert (second["body_base64"], "body" in second) == ("AAEC/w==", False)


def _changed(item: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**item, "message": {**item["message"], **fields}}


MALFORMED: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda item: _changed(item, body="other"), "fingerprint_mismatch"),
    (lambda item: _changed(item, to="topic:Orders"), "invalid_destination"),
    (lambda item: _changed(item, to="dm:" + "x" * 300), "invalid_destination"),
    (lambda item: _changed(item, version="2"), "unsupported_version"),
    (lambda item: _changed(item, unknown=1), "invalid_message"),
    (lambda item: _changed(item, priority="never"), "invalid_message"),
    (lambda item: _changed(item, body="nul \0"), "nul_character"),
    (lambda item: _changed(item, meta={"nul": "\0"}), "nul_character"),
    (lambda item: _changed(item, meta={"n": 2**53 + 1}), "meta_not_canonical"),
    (lambda item: _changed(item, meta={"mentions": "bob"}), "fingerprint_mismatch"),
    (lambda item: _changed(item, body_base64="?", body=None), "invalid_base64"),
    (lambda item: _changed(item, reply_to="no id"), "invalid_client_message_id"),
    (lambda item: _changed(item, traceparent="\0"), "invalid_traceparent"),
    (lambda item: {**item, "message": None}, "invalid_message"),
    (lambda item: {**item, "client_message_id": "with space"}, "invalid_client_message_id"),
    (lambda item: {**item, "client_message_id": ""}, "invalid_client_message_id"),
    (lambda item: {**item, "client_message_id": "x" * 129}, "invalid_client_message_id"),
    (lambda item: {**item, "request_fingerprint": "A" * 64}, "invalid_fingerprint"),
    (lambda item: {**item, "request_fingerprint": 1}, "invalid_item"),
    (lambda item: {**item, "unknown": 1}, "invalid_item"),
    (lambda _: {}, "invalid_item"),
    (lambda _: None, "invalid_item"),
]


async def test_a_malformed_message_fails_alone(broker: Any, message: Message, counts: Counts) -> None:
    bad = [change(message(f"bad-{number}")) for number, (change, _) in enumerate(MALFORMED)]
    first, *answers, last = await broker.member("alice").send(message("id-1"), *bad, message("id-2"))

    assert (first.status, last.status) == (201, 201)
    assert {answer.status for answer in answers} == {400}
    assert [answer.problem.code for answer in answers] == [code for _, code in MALFORMED]
    assert (await counts())["client_message_dedupe"] == 2


async def test_mentions_that_are_no_members_are_refused(
    broker: Any, refingerprinted: Callable[..., dict[str, Any]]
) -> None:
    wrong = ["bob", [1], ["Not A Name"], [f"m{n}" for n in range(257)]]
    items = [refingerprinted(f"id-{n}", meta={"mentions": mentions}) for n, mentions in enumerate(wrong)]

    answers = await broker.member("alice").send(*items)
    assert [(answer.status, answer.problem.code) for answer in answers] == [(400, "invalid_mention")] * len(wrong)
    assert "regex" not in str(answers)


async def test_an_event_version_is_a_positive_whole_number(broker: Any, message: Message) -> None:
    wrong = [{"event_version": version} for version in (0, -1, 1.5, "1", True, 2**31)]
    alice = broker.member("alice")

    answers = await alice.send(*(message(f"id-{n}", meta=meta) for n, meta in enumerate(wrong)))
    assert [(answer.status, answer.problem.code) for answer in answers] == [(400, "invalid_event_version")] * len(wrong)
    elsewhere = await alice.send(*(message(f"id-{n}", "dm:bob", meta=meta) for n, meta in enumerate(wrong)))
    assert {answer.status for answer in elsewhere} == {201}


async def test_a_body_above_the_limit_is_too_large_alone(broker: Any, message: Message, start_broker: Any) -> None:
    small = msgspec.structs.replace(broker.services.config, max_inline_bytes=5)
    async with start_broker(small) as other:
        alice = broker.member("alice").at(other.url)
        fits, too_large = await alice.send(message("id-1", body="12345"), message("id-2", body="123456"))

    assert fits.status == 201
    assert (too_large.status, too_large.problem.code, too_large.problem.field) == (413, "payload_too_large", "body")
