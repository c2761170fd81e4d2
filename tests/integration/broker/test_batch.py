"""A batch is one transaction: its order, its repeated ids, its failures (docs/contract/accept.md#accept-19)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from broker.database import QUERIES

Message = Callable[..., dict[str, Any]]
Counts = Callable[[], Awaitable[dict[str, int]]]

RAISE = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$"


async def test_answers_and_history_follow_the_order_of_the_request(broker: Any, message: Message) -> None:
    ids = ["z", "a", "m", "b"]
    answers = await broker.member("alice").send(*(message(client_id) for client_id in ids))

    assert [answer.client_message_id for answer in answers] == ids
    assert [answer.history_id for answer in answers] == [1, 2, 3, 4]
    minted = [answer.broker_message_id for answer in answers]
    assert minted == sorted(minted)


def large(message: Message, *ids: str) -> list[dict[str, Any]]:
    """Return messages whose values are more than what goes out in one statement."""
    return [message(client_id, body="x" * 500_000) for client_id in ids]


async def test_a_batch_too_large_for_one_statement_keeps_its_order_and_leaves_out_what_is_refused(
    broker: Any, message: Message, postgres: Any
) -> None:
    ids = [f"{9 - n}-id" for n in range(8)]
    alice = broker.member("alice")
    (before,) = await alice.send(message(ids[3], body="x" * 500_000))
    answers = await alice.send(*large(message, *ids), message("id-refused", "topic:nothing"))

    assert [answer.status for answer in answers] == [201, 201, 201, 200, 201, 201, 201, 201, 404]
    assert answers[3].broker_message_id == before.broker_message_id
    fresh = [answer.history_id for answer in answers if answer.status == 201]
    assert fresh == [2, 3, 4, 5, 6, 7, 8]
    events = await postgres.fetch("SELECT payload->>'client_message_id' FROM postroom.outbox_events ORDER BY position")
    assert [client_id for (client_id,) in events] == [ids[3], *ids[:3], *ids[4:]]


async def test_large_batches_of_the_same_ids_in_opposite_orders_do_not_deadlock(
    broker: Any, message: Message, start_broker: Any, counts: Counts
) -> None:
    items = large(message, *(f"id-{n}" for n in range(8)))
    async with start_broker(broker.services.config) as other:
        here, there = broker.member("alice"), broker.member("alice").at(other.url)
        for _ in range(3):
            answers = await asyncio.gather(here.send(*items), there.send(*reversed(items)), here.send(items[-1]))
            assert {answer.status for batch in answers for answer in batch} <= {200, 201}
    assert (await counts())["topic_message"] == 8


async def test_a_message_that_its_destination_refuses_uses_a_number_up_and_a_duplicate_does_not(
    broker: Any, message: Message
) -> None:
    alice = broker.member("alice")
    first = await alice.send(message("id-1"), message("id-2", "topic:nothing"), message("id-3"))
    again = await alice.send(message("id-1"), message("id-4"))

    assert [answer.history_id for answer in (*first, *again)] == [1, None, 3, 1, 4]


async def test_an_id_twice_in_one_batch_is_answered_as_one_after_the_other(broker: Any, message: Message) -> None:
    first, other, again = await broker.member("alice").send(
        message("id-1", body="one"), message("id-1", body="two"), message("id-1", body="one")
    )

    assert (first.status, other.status, again.status) == (201, 409, 200)
    assert again.broker_message_id == first.broker_message_id


async def test_the_second_of_two_contents_is_accepted_where_the_first_is_refused(broker: Any, message: Message) -> None:
    refused, accepted = await broker.member("alice").send(message("id-1", "topic:nothing"), message("id-1"))

    assert (refused.status, accepted.status) == (404, 201)


async def test_a_batch_of_copies_of_a_refused_message_is_refused_at_once(broker: Any, message: Message) -> None:
    answers = await broker.member("alice").send(*[message("id-1", "topic:nothing")] * 1000)

    assert {answer.status for answer in answers} == {404}


async def test_an_id_with_many_contents_is_refused_for_each(broker: Any, message: Message) -> None:
    answers = await broker.member("alice").send(*(message("id-1", f"topic:nothing_{n}") for n in range(10)))

    assert {(answer.status, answer.problem.code) for answer in answers} == {(404, "topic_not_found")}


@pytest.mark.parametrize("size", [1, 500_000], ids=["one statement", "several statements"])
async def test_what_is_refused_before_and_after_an_accepted_content_is_answered_in_order(
    broker: Any, message: Message, counts: Counts, size: int
) -> None:
    refused = [message("id-1", f"topic:nothing_{n}", body="x" * size) for n in range(6)]
    good, other = message("id-1", body="x" * size), message("id-1", body="y" * size)
    answers = await broker.member("alice").send(*refused, refused[0], good, *refused, other, good)

    assert [answer.status for answer in answers] == [404] * 7 + [201] + [409] * 7 + [200]
    assert answers[-1].broker_message_id == answers[7].broker_message_id
    assert (await counts())["topic_message"] == 1


async def test_a_failure_that_is_no_messages_own_fails_them_all_and_keeps_nothing(
    broker: Any, message: Message, counts: Counts, postgres: Any
) -> None:
    alice = broker.member("alice")
    await postgres.execute(RAISE)
    await postgres.execute("CREATE TRIGGER r BEFORE INSERT ON postroom.outbox_events EXECUTE FUNCTION refuse()")
    answers = await alice.send(message("id-1"), message("id-2", "dm:bob"))

    assert [(answer.status, answer.problem.retryable) for answer in answers] == [(503, True), (503, True)]
    assert not any((await counts()).values())

    await postgres.execute("DROP FUNCTION refuse CASCADE")
    assert [answer.status for answer in await alice.send(message("id-1"), message("id-2", "dm:bob"))] == [201, 201]


async def test_a_large_batch_that_fails_at_its_last_message_keeps_nothing(
    broker: Any, message: Message, counts: Counts, postgres: Any
) -> None:
    alice, items = broker.member("alice"), large(message, *(f"id-{n}" for n in range(8)))
    await postgres.execute(RAISE)
    await postgres.execute(
        "CREATE TRIGGER r BEFORE INSERT ON mesh.topic_message FOR EACH ROW "
        "WHEN (new.client_message_id = 'id-7') EXECUTE FUNCTION refuse()"
    )
    assert {answer.status for answer in await alice.send(*items)} == {503}
    assert not any((await counts()).values())

    await postgres.execute("DROP FUNCTION refuse CASCADE")
    assert {answer.status for answer in await alice.send(*items)} == {201}


async def test_a_body_that_is_no_batch_is_refused_whole(broker: Any) -> None:
    for body in (b"", b"null", b"[]", b'{"messages": []}', b'{"messages": {}}', b'{"messages": [', b"\xff"):
        answer = await broker.member("alice").post("/v1/accept", body)
        assert (answer.status, answer.code) == (400, "invalid_batch"), body


@pytest.mark.parametrize("body", [b'{"messages":[]}', b' {"messages": [ \n] } '])
async def test_a_batch_without_messages_is_refused_as_such(broker: Any, body: bytes) -> None:
    answer = await broker.member("alice").post("/v1/accept", body)

    assert answer.body["detail"] == "the body is not a batch of 1 to 1000 messages: it has none"


async def test_json_nested_beyond_measure_is_refused_whole(broker: Any) -> None:
    levels = 500_000  # Python 3.14 and newer follow some 100,000
    body = b'{"messages": [' + b"[" * levels + b"]" * levels + b"]}"

    answer = await broker.member("alice").post("/v1/accept", body)
    assert answer.status == 400
    assert "nested" in answer.body["detail"]


async def test_limits_come_before_work(broker: Any, message: Message, start_broker: Any) -> None:
    tight = msgspec.structs.replace(broker.services.config, max_batch=2, max_request_bytes=2000)
    async with start_broker(tight) as other:
        alice = broker.member("alice").at(other.url)
        too_many = await alice.post("/v1/accept", {"messages": [message(f"id-{n}") for n in range(3)]})
        too_large = await alice.post("/v1/accept", {"messages": [message("id-1", body="x" * 2000)]})

    assert (too_many.status, too_many.code) == (413, "batch_too_large")
    assert (too_large.status, too_large.code) == (413, "payload_too_large")


async def test_a_compressed_body_is_refused_unread(broker: Any) -> None:
    alice = broker.member("alice")
    headers = {"Authorization": f"Bearer {alice.token}", "Content-Encoding": "gzip"}
    async with alice.session.post(alice.url + "/v1/accept", data=b"\x1f\x8b", headers=headers) as answer:
        assert answer.status == 415


@pytest.mark.parametrize(
    ("media", "status"),
    [
        (None, 200),
        ("application/octet-stream", 200),
        ("Application/JSON; charset=UTF-8", 200),
        ("text/plain", 415),
        ("application/json; charset=utf-16", 415),
        ("application/jsonx", 415),
    ],
)
async def test_a_body_that_says_that_it_is_no_json_is_refused(
    broker: Any, message: Message, counts: Counts, media: str | None, status: int
) -> None:
    alice = broker.member("alice")
    headers = {"Authorization": f"Bearer {alice.token}"} | ({} if media is None else {"Content-Type": media})
    asking = {"data": msgspec.json.encode({"messages": [message("id-1")]}), "headers": headers}
    async with alice.session.post(alice.url + "/v1/accept", **asking, skip_auto_headers=["Content-Type"]) as answer:
        assert answer.status == status
    assert any((await counts()).values()) is (status == 200)


async def test_a_batch_larger_than_any_other_goes_through(broker: Any, message: Message, counts: Counts) -> None:
    answers = await broker.member("alice").send(*(message(f"id-{n:04}", mentions=["bob"]) for n in range(1000)))

    assert {answer.status for answer in answers} == {201}
    rows = await counts()
    assert (rows["topic_message"], rows["delivery_queue"], rows["mention_index"]) == (1000, 3000, 1000)


async def test_batches_of_many_members_and_destinations_do_not_deadlock(broker: Any, message: Message) -> None:
    to = ["topic:orders", "dm:alice", "dm:bob", "queue:work"]

    async def post(sender: str, number: int) -> list[int]:
        items = [message(f"{sender}-{number}-{n}", to[(n + number) % 4]) for n in range(20)]
        return [answer.status for answer in await broker.member(sender).send(*items)]

    results = await asyncio.gather(*(post(sender, number) for sender in ("alice", "bob", "ada") for number in range(8)))
    assert {status for statuses in results for status in statuses} == {201}
    deadlocks = await broker.services.database.reading.fetchval(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    )
    assert deadlocks == 0


async def test_postgres_ends_a_broker_that_stands_still_in_a_batch_that_others_wait_for(broker: Any) -> None:
    async with broker.services.database.accepting.acquire() as connection, connection.transaction():
        await connection.execute(QUERIES["accept_alone"], 1)
        assert await connection.fetchval("SHOW idle_in_transaction_session_timeout") == "10s"
