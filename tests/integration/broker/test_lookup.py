"""Asking which messages were accepted: B0 alone, and a "no" that stays true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from support.databases import HOLD_NUMBERS
from support.waiting import until

from broker import history
from postroom import BrokerClient
from postroom._wire.accept import AcceptResponse, SentMessage

Message = Callable[..., dict[str, Any]]
Counts = Callable[[], Awaitable[dict[str, int]]]
Waiting = Callable[[int], Awaitable[None]]


def asked(*items: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{name: item[name] for name in ("client_message_id", "request_fingerprint")} for item in items]}


async def look_up(caller: Any, *items: dict[str, Any]) -> list[int]:
    answer = await caller.post("/v1/accepted", asked(*items))
    assert answer.status == 200, answer.body
    return [each.status for each in msgspec.convert(answer.body, AcceptResponse).answers]


async def test_each_message_is_answered_for_and_nothing_is_written(
    broker: Any, message: Message, counts: Counts
) -> None:
    alice = broker.member("alice")
    first = await alice.send_one(message("mine", body="one"))
    await broker.member("bob").send_one(message("bobs"))
    before = await counts()

    answer = await alice.post(
        "/v1/accepted",
        asked(message("mine", body="one"), message("mine", body="two"), message("bobs"), message("none")),
    )
    there, other, bobs, none = msgspec.convert(answer.body, AcceptResponse).answers
    assert (there.status, there.broker_message_id, there.history_id) == (200, first.broker_message_id, first.history_id)
    assert (other.status, other.problem.conflict) == (409, "request_fingerprint_mismatch")
    assert (bobs.status, bobs.problem.conflict, bobs.broker_message_id) == (409, "id_of_another_member", None)
    assert (none.status, none.problem.code) == (404, "not_accepted")
    assert await counts() == before


async def test_it_costs_no_unit_of_a_limit(migrated: Any, start_broker: Any, message: Message) -> None:
    limiter = msgspec.structs.replace(migrated.limiter, per_member=1, window_seconds=3600)
    async with start_broker(msgspec.structs.replace(migrated, limiter=limiter)) as broker:
        await broker.add_mesh("limited")
        alice = broker.member("alice", "limited")
        for _ in range(3):
            assert await look_up(alice, message("id-1")) == [404]
        assert (await alice.send_one(message("id-1"))).status == 201
        assert (await alice.send_one(message("id-2"))).status == 429
        assert await look_up(alice, message("id-1"), message("id-2")) == [200, 404]


async def test_the_client_of_the_library_asks_too(broker: Any, message: Message) -> None:
    await broker.member("alice").send_one(message("id-1"))
    async with BrokerClient(broker.url, broker.tokens["demo", "alice"]) as client:
        answers = await client.accepted(
            [msgspec.convert(each, SentMessage) for each in asked(message("id-1"), message("id-2"))["messages"]]
        )
    assert [answer.status for answer in answers] == [200, 404]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": []},
        {"messages": [{"client_message_id": "id-1"}]},
        {"messages": [{"client_message_id": "no id", "request_fingerprint": "0" * 64}]},
        {"messages": [{"client_message_id": "id-1\n", "request_fingerprint": "0" * 64}]},
        {"messages": [{"client_message_id": "id-1", "request_fingerprint": "G" * 64}]},
        {"messages": [{"client_message_id": "id-1", "request_fingerprint": "0" * 64}] * 1001},
    ],
)
async def test_what_names_no_messages_is_a_400(broker: Any, body: dict[str, Any]) -> None:
    assert (await broker.member("alice").post("/v1/accepted", body)).code == "invalid_request"


async def test_a_post_that_is_at_work_is_waited_for(
    broker: Any, message: Message, postgres: Any, waiting_for_lock: Waiting
) -> None:
    alice = broker.member("alice")
    async with postgres.transaction():
        await postgres.execute(HOLD_NUMBERS)
        post = asyncio.create_task(alice.send_one(message("id-1")))
        await waiting_for_lock(1)
        asking = asyncio.create_task(look_up(alice, message("id-1")))
        await asyncio.wait([asking], timeout=0.1)
        assert not asking.done()
    assert (await post).status == 201
    assert await asking == [200]


async def test_a_post_that_has_not_begun_to_write_is_waited_for(
    broker: Any, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit = broker.services.limiter.admit
    at_work, go_on = asyncio.Event(), asyncio.Event()

    async def admit_later(*asked: Any) -> Any:
        at_work.set()
        await go_on.wait()
        return await admit(*asked)

    monkeypatch.setattr(broker.services.limiter, "admit", admit_later)
    alice = broker.member("alice")
    post = asyncio.create_task(alice.send_one(message("id-1")))
    await at_work.wait()
    asking = asyncio.create_task(look_up(alice, message("id-1")))
    await asyncio.wait([asking], timeout=0.1)
    assert not asking.done()
    go_on.set()
    assert (await post).status == 201
    assert await asking == [200]


async def test_a_post_at_work_in_another_instance_is_waited_for(
    broker: Any, message: Message, postgres: Any, waiting_for_lock: Waiting, start_broker: Any
) -> None:
    alice = broker.member("alice")
    async with start_broker(broker.services.config) as other, postgres.transaction():
        await postgres.execute(HOLD_NUMBERS)
        post = asyncio.create_task(alice.at(other.url).send_one(message("id-1")))
        await waiting_for_lock(1)
        asking = asyncio.create_task(look_up(alice, message("id-1")))
        await asyncio.wait([asking], timeout=0.1)
        assert not asking.done()
        await postgres.execute("COMMIT")
        assert (await post).status == 201
        assert await asking == [200]
        await postgres.execute("BEGIN")


async def test_a_post_that_does_not_end_leaves_the_question_open(
    broker: Any, message: Message, postgres: Any, waiting_for_lock: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_WAIT_SECONDS", 0.05)
    alice = broker.member("alice")
    async with postgres.transaction():
        await postgres.execute(HOLD_NUMBERS)
        post = asyncio.create_task(alice.send_one(message("id-1")))
        await waiting_for_lock(1)
        answer = await alice.post("/v1/accepted", asked(message("id-1")))
        assert (answer.status, answer.code, answer.body["retryable"]) == (503, "posts_at_work", True)
    assert (await post).status == 201


@pytest.fixture
async def impatient(broker: Any) -> AsyncIterator[Any]:
    """Alice on a connection of her own, which ends when she gives up."""
    async with aiohttp.ClientSession() as session:
        yield type(broker.nobody)(session, broker.url, broker.tokens["demo", "alice"])


async def test_what_nobody_waits_for_any_more_is_not_written(
    broker: Any, impatient: Any, message: Message, postgres: Any, waiting_for_lock: Waiting
) -> None:
    """The caller gives up while its batch waits for its turn; the look-up that follows says no, and that stays true."""
    alice = broker.member("alice")
    async with postgres.transaction():
        await postgres.execute(HOLD_NUMBERS)
        before = [asyncio.create_task(alice.send_one(message(f"before-{n}"))) for n in range(2)]
        await waiting_for_lock(2)  # as many as a mesh may write at once
        given_up = asyncio.create_task(impatient.send_one(message("id-1")))
        await until(lambda: len(broker.services.accepting._at_work[1]) == 3)
        given_up.cancel()
        await asyncio.wait([given_up])
        asking = asyncio.create_task(look_up(alice, message("id-1")))
    assert [answer.status for answer in await asyncio.gather(*before)] == [201, 201]
    assert await asking == [404]
    assert await postgres.fetchval("SELECT count(*) FROM mesh.client_message_dedupe") == 2


async def test_a_postgres_that_takes_no_writes_cannot_say_no(broker: Any, message: Message, postgres: Any) -> None:
    await broker.member("alice").send_one(message("id-1"))
    name = await postgres.fetchval("SELECT current_database()")
    await postgres.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    try:
        await broker.services.database.reading.expire_connections()
        assert await look_up(broker.member("alice"), message("id-1")) == [200]
        answer = await broker.member("alice").post("/v1/accepted", asked(message("id-2")))
        assert (answer.status, answer.code) == (503, "database_unavailable")
    finally:
        await postgres.execute("SET default_transaction_read_only = off")
        await postgres.execute(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
