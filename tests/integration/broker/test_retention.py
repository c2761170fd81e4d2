"""Expired messages go, in steps; a recognised id stays as a tombstone (docs/contract/accept.md#accept-37)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import asyncpg
import msgspec
import pytest
from support.clocks import clock_ahead

from broker.config import RetentionConfig
from broker.database import QUERIES
from broker.retention import Sweeper, step
from postroom.worker.orphans import find_orphans

LIFE = timedelta(days=RetentionConfig().dedupe_days)

Message = Callable[..., dict[str, Any]]
Counts = Callable[[], Awaitable[dict[str, int]]]
Age = Callable[..., Awaitable[None]]

NOTHING = {"topic_message": 0, "message_queue": 0, "message_history": 0, "delivery_queue": 0, "mention_index": 0}


@pytest.fixture
def age(tamper: Callable[[str], Awaitable[None]]) -> Age:
    """How to move the rows of a table into the past by some days, as if the clock had gone on."""

    async def move(**days: int) -> None:
        for table, time in days.items():
            past = f"- interval '{time} days'"
            accepted = "first_seen_at" if table == "client_message_dedupe" else "accepted_at"
            times = f"expires_at = expires_at {past}, {accepted} = {accepted} {past}"
            await tamper(f"UPDATE mesh.{table} SET {times}")  # noqa: S608 - our own names

    return move


async def test_nothing_goes_before_its_time(broker: Any, message: Message, postgres: Any) -> None:
    await broker.member("alice").send(message("id-1"))

    assert await step(postgres, 100, LIFE) == (0, 0)


async def test_an_expired_message_goes_whole_and_its_id_is_still_recognised(
    broker: Any, message: Message, postgres: Any, counts: Counts, age: Age
) -> None:
    alice = broker.member("alice")
    first, *_ = await alice.send(message("id-1", mentions=["bob"]), message("id-2", "dm:bob"))
    await age(message_history=31)

    assert await step(postgres, 100, LIFE) == (2, 0)
    assert {table: rows for table, rows in (await counts()).items() if table in NOTHING} == NOTHING
    again, other = await alice.send(message("id-1", mentions=["bob"]), message("id-1"))
    assert (again.status, again.history_available, again.history_id) == (200, False, first.history_id)
    assert other.status == 409
    assert (await alice.get("/v1/history")).body["messages"] == []
    assert await find_orphans(postgres, events_kept=LIFE) == []


async def test_an_id_is_forgotten_after_its_time_and_only_when_its_message_is_gone(
    broker: Any, message: Message, postgres: Any, age: Age
) -> None:
    alice = broker.member("alice")
    await alice.send_one(message("id-1", body="one"))
    await age(client_message_dedupe=31)
    assert await step(postgres, 100, LIFE) == (0, 0)
    assert (await alice.send_one(message("id-1", body="one"))).status == 200

    await age(message_history=31)
    assert await step(postgres, 100, LIFE) == (1, 1)
    assert (await alice.send_one(message("id-1", body="two"))).status == 201


async def test_a_mesh_of_the_name_of_a_deleted_one_goes_on_above_its_numbers(
    broker: Any, message: Message, postgres: Any, age: Age
) -> None:
    await broker.add_mesh("late")
    before = await broker.member("alice", "late").send(*(message(f"id-{n}") for n in range(3)))
    await age(client_message_dedupe=31, message_history=31)
    assert await step(postgres, 100, LIFE) == (3, 3)
    await postgres.execute("TRUNCATE postroom.outbox_events")  # they were published, and kept for a while
    assert (await broker.admin.delete("/v1/meshes/late")).status == 204

    await broker.add_mesh("late")
    alice = broker.member("alice", "late")
    new = [answer.history_id for answer in await alice.send(*(message(f"id-{n}") for n in range(5)))]
    page = await alice.get("/v1/history", after=before[-1].history_id)
    assert (page.status, [each["history_id"] for each in page.body["messages"]]) == (200, new)


async def test_a_longer_life_of_ids_holds_for_those_accepted_before(
    broker: Any, message: Message, postgres: Any, age: Age
) -> None:
    await broker.member("alice").send_one(message("id-1"))
    await age(message_history=31, client_message_dedupe=31)
    assert await step(postgres, 100, 2 * LIFE) == (1, 0)
    assert await step(postgres, 100, None) == (0, 0)
    assert await step(postgres, 100, LIFE) == (0, 1)


async def test_a_permanent_broker_forgets_no_id(
    broker: Any, message: Message, postgres: Any, start_broker: Any, age: Age
) -> None:
    retention = RetentionConfig(mode="permanent", message_days=1)
    async with start_broker(msgspec.structs.replace(broker.services.config, retention=retention)) as permanent:
        alice = broker.member("alice").at(permanent.url)
        await alice.send_one(message("id-1"))
        feature = (await alice.get("/v1/features")).body["client_message_id_dedupe"]
        assert (feature["mode"], feature["dedupe_retention_days"]) == ("permanent", None)

        await age(message_history=40_000)
        assert await step(postgres, 100, None) == (1, 0)
        assert (await alice.send_one(message("id-1"))).history_available is False


async def test_a_sweep_goes_on_step_by_step_until_all_is_gone(
    broker: Any, message: Message, counts: Counts, age: Age
) -> None:
    await broker.member("alice").send(*(message(f"id-{n}") for n in range(25)))
    await age(message_history=31, client_message_dedupe=31)
    sweeper = Sweeper(broker.services.database, RetentionConfig(sweep_rows=10), broker.services.metrics)

    assert await sweeper.sweep()
    assert (await counts())["client_message_dedupe"] == 0
    assert broker.metric("postroom_broker_swept_rows_total", kind="message") == 25
    assert broker.metric("postroom_broker_swept_rows_total", kind="id") == 25


async def test_nothing_is_deleted_by_a_clock_that_is_ahead(
    broker: Any, message: Message, counts: Counts, age: Age
) -> None:
    await broker.member("alice").send_one(message("id-1"))
    await age(message_history=3650, client_message_dedupe=3650)
    sweeper = Sweeper(broker.services.database, RetentionConfig(), broker.services.metrics)
    sweeper._clock = clock_ahead()

    before = await counts()
    assert await sweeper.sweep()
    assert await counts() == before


async def test_one_broker_sweeps_and_the_lock_goes_with_its_connection(broker: Any, migrated: Any) -> None:
    sweeper = Sweeper(broker.services.database, RetentionConfig(), broker.services.metrics)
    leader = await asyncpg.connect(migrated.database_url)
    assert await leader.fetchval(QUERIES["lead_sweeping"])

    assert not await sweeper.sweep()
    await leader.close()
    while not await sweeper.sweep():
        pass
    assert await sweeper.sweep()


async def test_a_sweep_that_ended_lets_other_brokers_sweep(broker: Any, postgres: Any) -> None:
    sweeper = Sweeper(broker.services.database, RetentionConfig(), broker.services.metrics)

    assert await sweeper.sweep()
    assert await postgres.fetchval(QUERIES["lead_sweeping"])


async def test_an_id_stays_bound_to_its_message_whoever_tries(broker: Any, message: Message, postgres: Any) -> None:
    await broker.member("alice").send_one(message("id-1"))
    changes = [
        "UPDATE mesh.client_message_dedupe SET broker_message_id = gen_random_uuid()",
        "UPDATE mesh.client_message_dedupe SET request_fingerprint = sha256('other')",
        "UPDATE mesh.client_message_dedupe SET client_message_id = 'other'",
        "UPDATE mesh.topic_message SET body = 'other'",
        "UPDATE mesh.message_history SET history_id = 7",
    ]

    for change in changes:
        with pytest.raises(asyncpg.RestrictViolationError):
            await postgres.execute(change)
    await postgres.execute("UPDATE mesh.client_message_dedupe SET history_available = false")
    with pytest.raises(asyncpg.RestrictViolationError):
        await postgres.execute("UPDATE mesh.client_message_dedupe SET history_available = true")
