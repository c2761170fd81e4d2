"""Random trees of activities, in any order, with replays, two workers on one message, and a crash at every commit.

A worker in miniature runs each message by its ledger (seed §10), and a crash ends its connection right before or right
after a commit. After each move, the database is held against the pure digits, and at the end nothing is left to do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from ledgers import LEASE, Jobs, asking

from ledger import digits
from ledger.errors import Duplicate, Fault, Forbidden, Held, Inactive
from ledger.primitives import (
    Child,
    Leg2,
    complete_leg1,
    enter_leg1,
    enter_leg2,
    finish_job,
    finish_work,
    spawn,
)

MOST_ACTIVITIES = 12
ACTIVITIES = "SELECT id, ledger, answers_due, answers_taken FROM ledger.activity WHERE job_id = $1 ORDER BY id"
GUIDS = "SELECT activity_id, guid, ledger FROM ledger.guid WHERE job_id = $1"
EFFECT = "SELECT postroom.emit('sea', 'effect', $2, $3, '{}', correlation_id => $1)"
EFFECTS = "SELECT aggregate_id FROM postroom.outbox_events WHERE correlation_id = $1 AND event_type = $2"


class Crash(NamedTuple):
    """The worker dies at commit number `commit`, right before it or right after it."""

    commit: int
    after: bool


class Crashed(Exception):
    """The worker is gone."""


class Worker:
    """A worker in miniature, on a connection that it does not outlive."""

    def __init__(self, connection: asyncpg.Connection[asyncpg.Record], crash: Crash | None = None) -> None:
        self.connection = connection
        self.crash = crash
        self.commits = 0
        self.dead = False

    async def commit(self, step: Callable[[], Awaitable[Any]]) -> Any:
        """Run a step in a transaction, unless this is where the worker dies; what is committed stays so."""
        here = self.crash if self.crash is not None and self.crash.commit == self.commits else None
        self.commits += 1
        async with self.connection.transaction():
            done = await step()
            if here is not None and not here.after:
                await self.die()
        if here is not None:
            await self.die()
        return done

    async def enter(self, entry: Callable[[], Awaitable[Any]]) -> Any:
        """Make an entry, which is a commit of its own: a replay is counted and refused."""
        if self.crash is not None and self.crash.commit == 0:
            return await self.commit(entry)
        self.commits += 1
        return await entry()

    async def die(self) -> None:
        self.dead = True
        try:
            await self.connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            raise Crashed from None

    async def effect(self, job: UUID, key: str, name: str) -> None:
        await self.connection.execute(EFFECT, job, key, name)

    async def run_leg1(self, activity: UUID) -> None:
        leg1 = await self.enter(lambda: enter_leg1(self.connection, activity, LEASE))
        await self.commit(lambda: complete_leg1(self.connection, leg1, asking()))

    async def run_leg2(self, activity: UUID, guid: str, work: dict[str, int]) -> None:
        entry: Leg2 = await self.enter(lambda: enter_leg2(self.connection, activity, guid, LEASE))
        steps, result = entry.steps, entry.result
        if not steps.work_done:
            result = json.dumps(work)
            await self.commit(lambda: self.work(entry, result or ""))
        if not steps.children_spawned:
            spawned = await self.commit(lambda: self.spawn(entry, json.loads(result or "")))
            steps = digits.decode_guid(spawned.ledger)
        if steps.job_closed and not steps.completion_done:
            await self.commit(lambda: self.complete(entry))

    async def work(self, entry: Leg2, result: str) -> None:
        await self.effect(entry.job, f"{entry.activity}/{entry.guid}", "worked")
        await finish_work(self.connection, entry, result)

    async def spawn(self, entry: Leg2, work: dict[str, int]) -> Any:
        children = [Child(uuid4(), "load") for _ in range(work["children"])]
        return await spawn(self.connection, entry, children, ["{}"] * work["again"])

    async def complete(self, entry: Leg2) -> None:
        await self.effect(entry.job, str(entry.job), "reported")
        await finish_job(self.connection, entry)


crashes = st.none() | st.builds(Crash, st.integers(0, 3), st.booleans())
which = st.integers(0, MOST_ACTIVITIES - 1)
works = st.fixed_dictionaries({"children": st.integers(0, 3), "again": st.integers(0, 1)})


class Trees(RuleBasedStateMachine):
    """One job, and whatever may happen to it."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.run = self.runner.run
        self.run(self.begin())

    async def begin(self) -> None:
        self.jobs = Jobs(await asyncpg.connect(self.url))
        self.job = (await self.jobs.begin()).job
        self.seen: dict[Any, int] = {}

    async def activities(self) -> list[asyncpg.Record]:
        return await self.jobs.connection.fetch(ACTIVITIES, self.job)

    async def guids(self) -> dict[tuple[UUID, str], int]:
        return {(row[0], row[1]): row[2] for row in await self.jobs.connection.fetch(GUIDS, self.job)}

    async def state(self) -> str:
        return (await self.jobs.job(self.job))[0]

    async def working(self, crash: Crash | None, work: Callable[[Worker], Awaitable[None]]) -> Fault | None:
        """Let a worker of its own do something; its leases are over when it is gone."""
        worker = Worker(await asyncpg.connect(self.url), crash)
        try:
            await work(worker)
        except Fault as fault:
            return fault
        except (Crashed, asyncpg.InterfaceError):
            if not worker.dead:
                raise
        finally:
            await worker.connection.close() if not worker.connection.is_closed() else worker.connection.terminate()
        return None

    async def pick(self, index: int) -> asyncpg.Record:
        activities = await self.activities()
        return activities[index % len(activities)]

    async def room(self, work: dict[str, int]) -> dict[str, int]:
        """Let a tree end."""
        full = len(await self.activities()) + work["children"] > MOST_ACTIVITIES
        return {"children": 0, "again": 0} if full else work

    @rule(index=which, crash=crashes)
    def deliver_to_leg_1(self, index: int, crash: Crash | None) -> None:
        self.run(self.leg1(index, crash))

    async def leg1(self, index: int, crash: Crash | None) -> None:
        before, state = await self.pick(index), await self.state()
        fault = await self.working(crash, lambda worker: worker.run_leg1(before["id"]))
        await self.jobs.end_leases(before["id"])
        complete = digits.is_set(before["ledger"], digits.LEG1_COMPLETE)
        after = before["ledger"]
        if state == "running" and (crash != Crash(0, after=False)) and not (complete and crash == Crash(0, after=True)):
            after = digits.enter_leg1(after)
        if state == "running" and (crash is None or crash.commit > 1 or crash == Crash(1, after=True)):
            after = digits.mark(after, digits.LEG1_COMPLETE)
        assert digits.render(after) == await self.jobs.activity(before["id"])
        assert isinstance(fault, Inactive if state != "running" else Duplicate if complete else type(None))

    @rule(index=which, message=st.integers(0, 3), work=works, crash=crashes)
    def deliver_to_leg_2(self, index: int, message: int, work: dict[str, int], crash: Crash | None) -> None:
        self.run(self.leg2(index, message, work, crash))

    async def leg2(self, index: int, message: int, work: dict[str, int], crash: Crash | None) -> None:
        before, guids, state = await self.pick(index), await self.guids(), await self.state()
        key, work = (before["id"], f"m-{message}"), await self.room(work)
        fault = await self.working(crash, lambda worker: worker.run_leg2(*key, work))
        await self.jobs.end_leases(before["id"])
        known = digits.decode_guid(guids[key]) if key in guids else None
        refused: type[Fault] | None = None
        if known is not None and known.done:
            refused = Duplicate
        elif state == "completed" or (state == "closed" and not (known and known.job_closed)):
            refused = Inactive
        elif not digits.is_set(before["ledger"], digits.LEG1_COMPLETE):
            refused = Forbidden
        elif known is None and before["answers_taken"] == before["answers_due"]:
            refused = Duplicate
        if refused is not None:
            assert isinstance(fault, refused)
            assert await self.guids() == guids
            assert digits.render(before["ledger"]) == await self.jobs.activity(before["id"])
            return
        assert fault is None
        if crash != Crash(0, after=False):
            entered = digits.enter_leg2(before["ledger"])
            ledger = (await self.guids())[key]
            ordinal = known.ordinal if known else digits.decode_guid(digits.seed_guid(entered)).ordinal
            assert digits.decode_guid(ledger).ordinal == ordinal
            after = await self.pick(index) if len(await self.activities()) == 1 else None
            assert after is None or digits.decode_activity(after["ledger"]).leg2_entries == entered % 10**8
            assert digits.decode_guid(ledger).done or crash is not None

    @rule(index=which, message=st.integers(0, 1), work=works)
    def deliver_to_two_workers(self, index: int, message: int, work: dict[str, int]) -> None:
        self.run(self.both(index, message, work))

    async def both(self, index: int, message: int, work: dict[str, int]) -> None:
        activity, work = (await self.pick(index))["id"], await self.room(work)

        def deliver() -> Awaitable[Fault | None]:
            return self.working(None, lambda worker: worker.run_leg2(activity, f"m-{message}", work))

        faults = await asyncio.gather(deliver(), deliver())
        assert all(isinstance(fault, Duplicate | Held | Inactive | Forbidden | None) for fault in faults)
        assert faults.count(None) <= 1
        await self.jobs.end_leases(activity)

    @invariant()
    def ledgers_only_grow_within_their_digits(self) -> None:
        self.run(self.look())

    async def look(self) -> None:
        activities, guids = await self.activities(), await self.guids()
        now = {row["id"]: row["ledger"] for row in activities} | guids
        for key, ledger in now.items():
            assert digits.parse(digits.render(ledger)) == ledger
            assert ledger >= self.seen.get(key, 0)
        assert self.seen.keys() <= now.keys()
        self.seen = now
        state, semaphore = await self.jobs.job(self.job)
        read = [digits.decode_guid(ledger) for ledger in guids.values()]
        answered = sum(guid.children_spawned for guid in read)
        assert semaphore == sum(row["answers_due"] for row in activities) - answered
        assert sum(guid.job_closed for guid in read) == (1 if semaphore == 0 else 0)
        assert (state == "running") == (semaphore > 0)

    def teardown(self) -> None:
        try:
            self.run(self.end())
            self.run(self.look())
        finally:
            self.run(self.jobs.connection.close())
            self.runner.close()

    async def end(self) -> None:
        """Deliver all that is left, and see that each thing has happened once."""
        worker = Worker(self.jobs.connection)
        for row in await self.activities():
            if not digits.is_set(row["ledger"], digits.LEG1_COMPLETE):
                await worker.run_leg1(row["id"])
            left = [guid for (activity, guid) in await self.left() if activity == row["id"]]
            fresh = [f"fresh-{number}" for number in range(row["answers_due"] - row["answers_taken"])]
            for guid in left + fresh:
                await worker.run_leg2(row["id"], guid, {"children": 0, "again": 0})
        while await self.state() != "completed":
            await self.end()
            return
        guids = await self.guids()
        worked = [row[0] for row in await self.jobs.connection.fetch(EFFECTS, self.job, "worked")]
        assert sorted(worked) == sorted(f"{activity}/{guid}" for activity, guid in guids)
        assert all(digits.decode_guid(ledger).done for ledger in guids.values())
        events = await self.jobs.events(self.job)
        activities = await self.activities()
        counts = [events.count(name) for name in ("job_started", "reported", "job_completed")]
        assert counts == [1, 1, 1]
        assert events.count("asked") == events.count("activity_spawned") == len(activities)
        assert events.count("activity_cycled") == sum(row["answers_due"] - 1 for row in activities)

    async def left(self) -> list[tuple[UUID, str]]:
        return [key for key, ledger in (await self.guids()).items() if not digits.decode_guid(ledger).done]


def drive(url: str, runs: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Trees(url),
        settings=settings(
            max_examples=runs,
            stateful_step_count=25,
            phases=(Phase.reuse, Phase.generate),  # a failure is shrunk by hand: each try costs a job
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_each_step_of_any_tree_happens_once(jobs_database: str) -> None:
    drive(jobs_database, 25)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_each_step_of_five_hundred_trees_happens_once(jobs_database: str) -> None:
    drive(jobs_database, 500)
