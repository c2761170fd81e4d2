"""What entries and steps are refused with, and that a refusal changes nothing."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

import asyncpg
import pytest
from support.ledgers import LEASE, Jobs, asking

from postroom.ledger.errors import Duplicate, Forbidden, Held, Inactive, LeaseLost, Missing, Overflow, Reaction
from postroom.ledger.primitives import (
    Child,
    complete_leg1,
    enter_leg1,
    enter_leg2,
    fail_activity,
    finish_job,
    release,
    renew,
    spawn,
    start_job,
)


async def test_an_unknown_activity_is_missing(jobs: Jobs) -> None:
    for entry in (enter_leg1(jobs.connection, uuid4(), LEASE), enter_leg2(jobs.connection, uuid4(), "m-1", LEASE)):
        with pytest.raises(Missing) as fault:
            await entry
        assert fault.value.reaction is Reaction.ACKNOWLEDGE


async def test_a_job_that_is_begun_twice_is_begun_once(jobs: Jobs) -> None:
    start = await jobs.begin()
    with pytest.raises(Duplicate):
        await start_job(jobs.connection, start)

    assert await jobs.events(start.job) == ["job_started", "activity_spawned"]
    assert await jobs.job(start.job) == ("running", 1)


async def test_leg_2_before_leg_1_is_forbidden_and_comes_again(jobs: Jobs) -> None:
    start = await jobs.begin()
    leg1 = await enter_leg1(jobs.connection, start.root, LEASE)
    with pytest.raises(Forbidden) as fault:
        await jobs.enter(start.root)
    assert (fault.value.reaction, fault.value.retryable) == (Reaction.RETRY, True)
    assert await jobs.activity(start.root) == "001000000000000"

    await complete_leg1(jobs.connection, leg1, asking())
    assert (await jobs.enter(start.root)).steps.dimension == 0


async def test_step_3_of_a_message_that_did_not_close_the_job_is_forbidden(jobs: Jobs) -> None:
    start = await jobs.asked()
    entry = await jobs.enter(start.root)
    with pytest.raises(Forbidden, match="step 3"):
        await finish_job(jobs.connection, entry)
    assert await jobs.guid(start.root) == "000000000000001"
    assert await jobs.job(start.job) == ("running", 1)


async def test_a_step_is_done_once_and_what_was_written_beside_a_replay_goes_with_it(jobs: Jobs) -> None:
    start = await jobs.asked()
    entry = await jobs.enter(start.root)
    await spawn(jobs.connection, entry, [Child(uuid4(), "load")])
    other = await jobs.begin()

    async def work_again() -> None:
        async with jobs.connection.transaction():
            await fail_activity(jobs.connection, other.root, "written beside it")
            await spawn(jobs.connection, entry)

    with pytest.raises(LeaseLost):  # a step gives up the lease that it needs
        await work_again()
    assert await jobs.job(other.job) == ("running", 1)
    assert await jobs.job(start.job) == ("running", 1)


async def test_an_answer_more_than_is_due_is_a_duplicate(jobs: Jobs) -> None:
    """Another message for an activity that is answered must not close what its siblings owe."""
    start = await jobs.asked()
    await jobs.enter(start.root, "m-1")
    with pytest.raises(Duplicate):
        await jobs.enter(start.root, "m-2")
    assert await jobs.activity(start.root) == "001100000000001"


async def test_a_job_that_has_ended_takes_no_message(jobs: Jobs) -> None:
    start = await jobs.asked()
    entry = await jobs.enter(start.root)
    await fail_activity(jobs.connection, start.root, "the disk is full")
    refused = [
        enter_leg1(jobs.connection, start.root, LEASE),
        jobs.enter(start.root, "m-1"),
        jobs.enter(start.root, "m-2"),
        spawn(jobs.connection, entry, [Child(uuid4(), "load")]),
        finish_job(jobs.connection, entry),
        fail_activity(jobs.connection, start.root, "again"),
    ]
    for step in refused:
        with pytest.raises(Inactive, match="failed") as fault:
            await step
        assert fault.value.reaction is Reaction.ACKNOWLEDGE
    assert await jobs.activity(start.root) == "001100000000001"
    assert (await jobs.events(start.job))[-1] == "job_failed"


async def test_a_semaphore_that_would_go_below_0_is_refused_whole(jobs: Jobs) -> None:
    start = await jobs.asked()
    entry = await jobs.enter(start.root)
    closing = "UPDATE ledger.job SET semaphore = 0, state = 'closed' WHERE id = $1"
    await jobs.connection.execute(closing, start.job)
    with pytest.raises(Inactive):
        await spawn(jobs.connection, entry)
    assert await jobs.guid(start.root) == "000000000000001"
    assert await jobs.job(start.job) == ("closed", 0)


async def test_the_thousandth_attempt_of_leg_1_fails_fast_and_changes_nothing(jobs: Jobs) -> None:
    start = await jobs.begin()
    await jobs.set_ledger(start.root, 998_000_000_000_000)
    await release(jobs.connection, await enter_leg1(jobs.connection, start.root, LEASE))
    with pytest.raises(Overflow, match="999000000000000") as fault:
        await enter_leg1(jobs.connection, start.root, LEASE)
    assert fault.value.reaction is Reaction.ESCALATE
    assert await jobs.activity(start.root) == "999000000000000"

    await fail_activity(jobs.connection, start.root, str(fault.value))
    assert (await jobs.job(start.job))[0] == "failed"
    assert (await jobs.events(start.job))[-1] == "job_failed"
    assert await jobs.activity(start.root) == "999000000000000"


async def test_entry_100_000_000_into_leg_2_fails_fast_and_changes_nothing(jobs: Jobs) -> None:
    start = await jobs.asked()
    await jobs.set_ledger(start.root, 1_100_099_999_998)
    last = await jobs.enter(start.root)
    assert last.steps.dimension == 99_999_998
    await release(jobs.connection, last)
    with pytest.raises(Overflow, match="001100099999999") as fault:
        await jobs.enter(start.root)
    assert fault.value.reaction is Reaction.ESCALATE
    assert await jobs.activity(start.root) == "001100099999999"
    assert await jobs.guid(start.root) == "000000099999999"


async def test_a_lease_holds_others_off_until_it_is_released(jobs: Jobs) -> None:
    start = await jobs.begin()
    leg1 = await enter_leg1(jobs.connection, start.root, LEASE)
    with pytest.raises(Held) as fault:
        await enter_leg1(jobs.connection, start.root, LEASE)
    assert (fault.value.reaction, await jobs.activity(start.root)) == (Reaction.RETRY, "001000000000000")
    assert 0 < (fault.value.problem.retry_after or 0) <= LEASE.total_seconds()

    await complete_leg1(jobs.connection, leg1, asking())
    entry = await jobs.enter(start.root)
    with pytest.raises(Held):
        await jobs.enter(start.root)
    await release(jobs.connection, entry)
    assert (await jobs.enter(start.root)).attempt == 2


async def test_a_lease_that_ran_out_commits_nothing_and_is_not_renewed(jobs: Jobs) -> None:
    start = await jobs.begin()
    leg1 = await enter_leg1(jobs.connection, start.root, LEASE)
    await jobs.end_leases(start.root)
    for late in (complete_leg1(jobs.connection, leg1, asking()), renew(jobs.connection, leg1.claim, LEASE)):
        with pytest.raises(LeaseLost):
            await late
    await jobs.ask(start.root)
    with pytest.raises(Duplicate):
        await complete_leg1(jobs.connection, leg1, asking())
    assert (await jobs.events(start.job)).count("asked") == 1

    entry = await jobs.enter(start.root)
    await jobs.end_leases(start.root)
    taken_over = await jobs.enter(start.root)
    for late in (
        spawn(jobs.connection, entry, [Child(uuid4(), "load")]),
        finish_job(jobs.connection, entry),
        renew(jobs.connection, entry.claim, LEASE),
    ):
        with pytest.raises(LeaseLost):
            await late
    assert await jobs.guid(start.root) == "000000000000001"
    assert await jobs.job(start.job) == ("running", 1)
    await renew(jobs.connection, taken_over.claim, LEASE)


async def test_a_lease_that_a_clock_ahead_has_given_holds_nobody_off_once_that_is_set_back(jobs: Jobs) -> None:
    start = await jobs.begin()
    late = await enter_leg1(jobs.connection, start.root, LEASE)
    await jobs.set_back(start.root)
    leg1 = await enter_leg1(jobs.connection, start.root, LEASE)
    with pytest.raises(LeaseLost):
        await complete_leg1(jobs.connection, late, asking())
    await complete_leg1(jobs.connection, leg1, asking())
    entry = await jobs.enter(start.root)
    await jobs.set_back(start.root)
    await renew(jobs.connection, entry.claim, LEASE)  # its worker lives
    with pytest.raises(Held):
        await jobs.enter(start.root)
    await jobs.set_back(start.root)
    assert (await jobs.enter(start.root)).attempt == 2


async def test_a_lease_is_renewed_while_it_holds(jobs: Jobs) -> None:
    start = await jobs.asked()
    entry = await jobs.enter(start.root)
    query = "SELECT leased_until FROM ledger.guid WHERE activity_id = $1"
    before = await jobs.connection.fetchval(query, start.root)
    await renew(jobs.connection, entry.claim, 2 * LEASE)
    assert await jobs.connection.fetchval(query, start.root) > before
    await spawn(jobs.connection, entry)


async def test_a_worker_that_stands_still_after_its_step_is_ended_by_postgres(jobs: Jobs) -> None:
    start = await jobs.asked()
    entry = await jobs.enter(start.root)
    async with jobs.connection.transaction():
        await spawn(jobs.connection, entry)
        assert await jobs.connection.fetchval("SHOW idle_in_transaction_session_timeout") == "10s"


async def test_of_two_workers_that_enter_one_new_message_one_does(jobs: Jobs, jobs_database: str) -> None:
    """The second waits for the first one's row, and finds it held: nobody takes it for a replay that can go."""
    async with asyncpg.create_pool(jobs_database, min_size=8, max_size=8) as pool:

        async def enter(activity: UUID) -> str:
            async with pool.acquire() as connection:
                try:
                    await enter_leg2(connection, activity, "m-1", LEASE)
                except Held:
                    return "held"
                return "entered"

        for _ in range(20):
            start = await jobs.asked()
            outcomes = await asyncio.gather(*(enter(start.root) for _ in range(8)))
            assert sorted(outcomes) == ["entered"] + ["held"] * 7
            assert await jobs.activity(start.root) == "001100000000001"


async def test_the_cycles_of_one_activity_run_at_once(jobs: Jobs, jobs_database: str) -> None:
    start = await jobs.asked()
    root = await jobs.enter(start.root, "m-0")
    await spawn(jobs.connection, root, again=["{}"] * 24)

    async with asyncpg.create_pool(jobs_database, min_size=8, max_size=8) as pool:

        async def run(guid: str) -> tuple[int, bool]:
            async with pool.acquire() as connection:
                entry = await enter_leg2(connection, start.root, guid, LEASE)
                return entry.steps.dimension, (await spawn(connection, entry)).threshold_hit

        ran = await asyncio.gather(*(run(f"m-{number}") for number in range(1, 25)))

    assert sorted(dimension for dimension, _ in ran) == list(range(1, 25))
    assert sum(hit for _, hit in ran) == 1
    assert await jobs.activity(start.root) == "001111000000025"


async def test_of_many_messages_that_are_done_at_once_one_closes_the_job(jobs: Jobs, jobs_database: str) -> None:
    start = await jobs.asked()
    root = await jobs.enter(start.root)
    children = [Child(uuid4(), "load") for _ in range(24)]
    await spawn(jobs.connection, root, children)
    for child in children:
        await jobs.ask(child.id)

    async with asyncpg.create_pool(jobs_database, min_size=8, max_size=8) as pool:

        async def run(child: Child) -> bool:
            async with pool.acquire() as connection:
                entry = await enter_leg2(connection, child.id, "m-1", LEASE)
                return (await spawn(connection, entry)).threshold_hit

        closed = await asyncio.gather(*map(run, children))

    assert sum(closed) == 1
    assert await jobs.job(start.job) == ("closed", 0)
