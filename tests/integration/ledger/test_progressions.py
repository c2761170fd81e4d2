"""The progressions of docs/contract/jobs.md#jobs-34, digit for digit, as the primitives write them to Postgres."""

from __future__ import annotations

from uuid import uuid4

import pytest
from support.ledgers import LEASE, Jobs, asking

from postroom.ledger.errors import Duplicate
from postroom.ledger.primitives import Child, complete_leg1, enter_leg1, finish_job, release, spawn


async def test_leg_1_is_entered_completed_and_replayed(jobs: Jobs) -> None:
    start = await jobs.begin()
    states = [await jobs.activity(start.root)]
    leg1 = await enter_leg1(jobs.connection, start.root, LEASE)
    states.append(await jobs.activity(start.root))
    await complete_leg1(jobs.connection, leg1, asking())
    states.append(await jobs.activity(start.root))
    with pytest.raises(Duplicate):
        await enter_leg1(jobs.connection, start.root, LEASE)
    states.append(await jobs.activity(start.root))

    assert states == ["000000000000000", "001000000000000", "001100000000000", "002100000000000"]
    assert await jobs.events(start.job) == ["job_started", "activity_spawned", "asked"]


async def test_two_children_move_the_semaphore_by_one(jobs: Jobs) -> None:
    """The semaphore is 5 before, and 6 after (docs/contract/jobs.md#jobs-21)."""
    start = await jobs.asked()
    root = await jobs.enter(start.root)
    children = [Child(uuid4(), "load") for _ in range(5)]
    assert (await spawn(jobs.connection, root, children)).semaphore == 5

    await jobs.ask(children[0].id)
    child = await jobs.enter(children[0].id)
    spawned = await spawn(jobs.connection, child, [Child(uuid4(), "check", '{"n": 1}'), Child(uuid4(), "check")])

    assert (spawned.semaphore, spawned.threshold_hit) == (6, False)
    assert await jobs.guid(child.activity) == "000011000000001"
    assert await jobs.activity(child.activity) == "001111000000001"
    assert (await jobs.events(start.job)).count("activity_spawned") == 1 + 5 + 2


async def test_no_children_close_the_job_and_step_3_completes_it(jobs: Jobs) -> None:
    """The semaphore is 1 before, and 0 after; the snapshot survives a crash (docs/contract/jobs.md#jobs-19)."""
    start = await jobs.asked()
    entry = await jobs.enter(start.root)
    assert (await jobs.guid(start.root), await jobs.activity(start.root)) == ("000000000000001", "001100000000001")
    spawned = await spawn(jobs.connection, entry)
    assert (spawned.semaphore, spawned.threshold_hit) == (0, True)
    assert (await jobs.guid(start.root), await jobs.activity(start.root)) == ("000111000000001", "001111000000001")
    assert await jobs.job(start.job) == ("closed", 0)

    await jobs.end_leases(start.root)  # the worker crashed
    again = await jobs.enter(start.root)
    assert (again.steps.job_closed, again.steps.done) == (True, False)
    await finish_job(jobs.connection, again)
    assert (await jobs.guid(start.root), await jobs.activity(start.root)) == ("000111100000001", "001111100000002")
    assert await jobs.job(start.job) == ("completed", 0)
    assert (await jobs.events(start.job))[-1] == "job_completed"
    with pytest.raises(Duplicate):
        await jobs.enter(start.root)


async def test_ten_cycles_are_ten_dimensions_and_leave_the_markers_at_1(jobs: Jobs) -> None:
    """Each cycle has a dimension (docs/contract/jobs.md#jobs-14); a marker per message would overflow."""
    start = await jobs.asked()
    for cycle in range(10):
        entry = await jobs.enter(start.root, f"m-{cycle}")
        assert entry.steps.dimension == cycle
        await spawn(jobs.connection, entry, [Child(uuid4(), "load")], again=["{}"])

    assert await jobs.activity(start.root) == "001111000000010"
    assert await jobs.guid(start.root, "m-9") == "000011000000010"
    assert await jobs.job(start.job) == ("running", 11)
    query = "SELECT dimension FROM ledger.activity WHERE parent_id = $1 ORDER BY dimension"
    assert [row[0] for row in await jobs.connection.fetch(query, start.root)] == list(range(10))
    assert (await jobs.events(start.job)).count("activity_cycled") == 10


async def test_a_message_that_came_twice_leaves_a_gap_before_the_dimension_of_the_next_cycle(jobs: Jobs) -> None:
    start = await jobs.asked()
    await release(jobs.connection, await jobs.enter(start.root, "m-0"))
    entry = await jobs.enter(start.root, "m-0")
    await spawn(jobs.connection, entry, [], again=["{}"])
    next_entry = await jobs.enter(start.root, "m-1")
    assert (entry.steps.dimension, next_entry.steps.dimension) == (0, 2)


async def test_the_tenth_attempt_of_leg_1_is_ordinary(jobs: Jobs) -> None:
    start = await jobs.begin()
    for _ in range(10):
        await release(jobs.connection, await enter_leg1(jobs.connection, start.root, LEASE))

    assert await jobs.activity(start.root) == "010000000000000"


async def test_a_message_is_seeded_with_its_ordinal_alone_and_redeliveries_do_not_move_it(jobs: Jobs) -> None:
    start = await jobs.asked()
    await jobs.set_ledger(start.root, 1_111_012_345_677)
    for attempt in (1, 2, 3):
        entry = await jobs.enter(start.root)
        assert (entry.attempt, entry.steps.dimension) == (attempt, 12_345_677)
        assert await jobs.guid(start.root) == "000000012345678"
        await release(jobs.connection, entry)
    assert await jobs.activity(start.root) == "001111012345680"
