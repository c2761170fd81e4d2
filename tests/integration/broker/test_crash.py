"""The broker dies, or Postgres drops it, at every table of the accept transaction: all of it is there, or nothing.

Nothing in the broker knows of this: a trigger on the table waits for an advisory lock that the test holds, so that the
statement stands still at a known place while the test kills somebody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from operator import not_
from typing import Any

import aiohttp
import msgspec
import pytest
from support.waiting import until_so

Message = Callable[..., dict[str, Any]]
Counts = Callable[[], Awaitable[dict[str, int]]]
Waiting = Callable[[int], Awaitable[None]]

TABLES = [
    "mesh.client_message_dedupe",
    "mesh.topic_message",
    "mesh.message_queue",
    "mesh.message_history",
    "mesh.delivery_queue",
    "mesh.mention_index",
    "postroom.outbox_events",
]
WHOLE = {
    "client_message_dedupe": 2,
    "topic_message": 1,
    "message_queue": 1,
    "message_history": 2,
    "delivery_queue": 4,
    "mention_index": 1,
    "outbox_events": 1,
}
NOTHING = dict.fromkeys(WHOLE, 0)
GATE = 47  # the advisory lock


@dataclass(frozen=True)
class Standstill:
    """A broker whose accepts stand still when they write to one table, until the gate is opened."""

    broker: Any
    postgres: Any
    reached: Waiting

    async def open_gate(self) -> None:
        await self.postgres.execute(f"SELECT pg_advisory_unlock({GATE})")

    async def until_idle(self) -> None:
        """Wait until no statement of a broker runs: what a dead one began has ended one way or the other."""
        query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'postroom-broker' AND state = 'active'"
        await until_so(lambda: self.postgres.fetchval(query), holds=not_)


@pytest.fixture(params=TABLES)
async def standstill(
    request: pytest.FixtureRequest, broker: Any, postgres: Any, waiting_for_lock: Waiting
) -> AsyncIterator[Standstill]:
    await postgres.execute(
        "CREATE FUNCTION stand_still() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN PERFORM pg_advisory_xact_lock_shared({GATE}); RETURN NULL; END $$;"
        f"CREATE TRIGGER s AFTER INSERT OR UPDATE ON {request.param} FOR EACH ROW EXECUTE FUNCTION stand_still()"
    )
    await postgres.execute(f"SELECT pg_advisory_lock({GATE})")
    yield Standstill(broker, postgres, waiting_for_lock)
    await postgres.execute("SELECT pg_advisory_unlock_all()")
    await postgres.execute("DROP FUNCTION stand_still CASCADE")


@pytest.fixture
def batch(message: Message) -> list[dict[str, Any]]:
    return [message("id-1", mentions=["bob"]), message("id-2", "dm:bob")]


async def test_a_broker_killed_in_the_transaction_leaves_all_or_nothing_and_a_retry_is_answered_right(
    standstill: Standstill, broker_process: Any, batch: list[dict[str, Any]], counts: Counts
) -> None:
    alice = standstill.broker.member("alice")
    post = asyncio.create_task(alice.at(broker_process.url).post("/v1/accept", {"messages": batch}))
    await standstill.reached(1)
    broker_process.kill()
    with pytest.raises(aiohttp.ClientError):
        await post
    await standstill.open_gate()
    await standstill.until_idle()

    rows = await counts()
    assert rows in (WHOLE, NOTHING)
    retry = await alice.send(*batch)
    assert {answer.status for answer in retry} == ({200} if rows == WHOLE else {201})
    assert await counts() == WHOLE


async def test_a_transaction_that_postgres_drops_leaves_nothing_and_a_retry_is_accepted(
    standstill: Standstill, batch: list[dict[str, Any]], counts: Counts, postgres: Any
) -> None:
    alice = standstill.broker.member("alice")
    post = asyncio.create_task(alice.send(*batch))
    await standstill.reached(1)
    await postgres.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    answers = await post

    assert [(answer.status, answer.problem.code) for answer in answers] == [(503, "outcome_unknown")] * 2
    assert await counts() == NOTHING
    await standstill.open_gate()
    assert {answer.status for answer in await alice.send(*batch)} == {201}
    assert await counts() == WHOLE


async def test_a_commit_whose_answer_was_lost_is_looked_up_before_answering(
    broker: Any, batch: list[dict[str, Any]], counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks after the commit: the broker has an error in its hands, and the rows are there."""
    store = broker.services.accepting._store
    write = store.write

    async def write_and_lose_the_answer(*arguments: Any) -> Any:
        await write(*arguments)
        raise ConnectionResetError

    monkeypatch.setattr(store, "write", write_and_lose_the_answer)
    answers = await broker.member("alice").send(*batch)

    assert {answer.status for answer in answers} == {200}
    assert broker.metric("postroom_broker_unknown_outcomes_total") == 1
    assert await counts() == WHOLE


async def test_a_batch_that_failed_is_not_another_members_of_the_same_ids(
    broker: Any, batch: list[dict[str, Any]], counts: Counts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alice's batch commits between bob's look-up and bob's write, which fails: what is found there is not bob's."""
    store = broker.services.accepting._store
    write = store.write

    async def be_late(*_: Any) -> Any:
        monkeypatch.setattr(store, "write", write)
        await broker.member("alice").send(*batch)
        raise ConnectionResetError

    monkeypatch.setattr(store, "write", be_late)
    answers = await broker.member("bob").send(*batch)

    assert {(answer.status, answer.problem.conflict) for answer in answers} == {(409, "id_of_another_member")}
    assert await counts() == WHOLE


async def test_a_broker_without_postgres_says_so_and_recovers(
    migrated: Any, own_postgres: Any, start_broker: Any, message: Message
) -> None:
    async with start_broker(msgspec.structs.replace(migrated, database_url=own_postgres.url_of("own"))) as broker:
        await broker.add_mesh()
        alice = broker.member("alice")
        assert (await alice.send_one(message("id-1"))).status == 201
        own_postgres.stop()
        away = await alice.post("/v1/accept", {"messages": [message("id-1"), message("id-2")]})
        assert (away.status, away.body["retryable"]) == (503, True)
        assert ((await broker.nobody.get("/ready")).status, (await broker.nobody.get("/health")).status) == (503, 200)
        assert (await broker.admin.get("/v1/meshes")).code == "database_unavailable"

        own_postgres.start()
        assert [answer.status for answer in await alice.send(message("id-1"), message("id-2"))] == [200, 201]
        assert (await broker.nobody.get("/ready")).status == 200
