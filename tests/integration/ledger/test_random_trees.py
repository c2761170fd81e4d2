"""Random trees of activities, in any order, with replays, two workers on one message, and a crash at every commit.

The legs run as a worker runs them, on connections that end right before or right after a commit. After each move, the
database is held against the pure digits, and at the end nothing is left to do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from support.ledgers import LEASE, Jobs, mark, seed_guid

from postroom._wire import digits
from postroom.flow import Context, Flow, Job, Step
from postroom.ledger import operations
from postroom.ledger.errors import Duplicate, Fault, Forbidden, Held, Inactive
from postroom.ledger.legs import HandlerFailed, Running, run_leg1, run_leg2
from postroom.ledger.primitives import Answer
from postroom.testing.flows import Crash, Crashed, MortalWorker

MOST_ACTIVITIES = 12
ACTIVITIES = "SELECT id, ledger, answers_due, answers_taken FROM ledger.activity WHERE job_id = $1 ORDER BY id"
GUIDS = "SELECT activity_id, guid, ledger FROM ledger.guid WHERE job_id = $1"
REQUESTS = "SELECT id, answered_by FROM ledger.request WHERE activity_id = $1 ORDER BY id"
EFFECT = "SELECT postroom.emit('sea', 'effect', $2, $3, '{}', correlation_id => $1)"
EFFECTS = "SELECT aggregate_id FROM postroom.outbox_events WHERE correlation_id = $1 AND event_type = $2"


def a_flow(effect: Callable[[Context, str, str], Awaitable[None]]) -> Flow:
    """Make the flow, whose handlers each have an effect."""
    flow = Flow("nightly-export")

    @flow.activity(sends="queue:asked")
    async def extract(ctx: Context, _request: Any) -> None:
        await effect(ctx, ctx.idempotency_key, "requested")

    @extract.answered
    async def _(ctx: Context, work: dict[str, int]) -> list[Step]:
        await effect(ctx, ctx.idempotency_key, "worked")
        return [extract.spawn() for _ in range(work["children"])] + [extract.again() for _ in range(work["again"])]

    @flow.completed
    async def report(ctx: Context, job: Job) -> None:
        assert ctx.idempotency_key == str(job.id)
        await effect(ctx, ctx.idempotency_key, "reported")

    return flow


async def write(ctx: Context, key: str, name: str) -> None:
    """Have an effect in the transaction of the step."""
    connection = await ctx.connection()
    await connection.execute(EFFECT, ctx.job, key, name)


async def write_nothing(_ctx: Context, _key: str, _name: str) -> None:
    """Let the step be its primitive and nothing else."""


WRITING, QUIET = a_flow(write), a_flow(write_nothing)


crashes = st.none() | st.builds(Crash, st.integers(0, 2), st.booleans())
which = st.integers(0, MOST_ACTIVITIES - 1)
works = st.fixed_dictionaries({"children": st.integers(0, 3), "again": st.integers(0, 1)})


class Trees(RuleBasedStateMachine):
    """One job, and whatever may happen to it."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.run = self.runner.run
        self.flow = WRITING
        self.run(self.begin())

    @initialize(writes=st.booleans())
    def choose(self, writes: bool) -> None:  # noqa: FBT001 - one of two
        self.flow = WRITING if writes else QUIET

    async def begin(self) -> None:
        self.pool = await asyncpg.create_pool(self.url, min_size=1, max_size=3)
        self.jobs = Jobs(await asyncpg.connect(self.url))
        self.job = (await self.jobs.begin()).job
        self.seen: dict[Any, int] = {}

    async def activities(self) -> list[asyncpg.Record]:
        return await self.jobs.connection.fetch(ACTIVITIES, self.job)

    async def guids(self) -> dict[tuple[UUID, str], int]:
        return {(row[0], row[1]): row[2] for row in await self.jobs.connection.fetch(GUIDS, self.job)}

    async def state(self) -> str:
        return (await self.jobs.job(self.job))[0]

    async def working(self, crash: Crash | None, work: Callable[[Running], Awaitable[None]]) -> Fault | None:
        """Let a worker of its own do something; its leases are over when it is gone."""
        if crash is None:
            return await self.running(self.pool, work)
        worker = MortalWorker(crash)
        async with worker.pool(self.url) as pool:
            try:
                return await self.running(pool, work)
            except (Crashed, HandlerFailed, asyncpg.PostgresConnectionError, asyncpg.InterfaceError):
                if not worker.dead:
                    raise
        return None

    async def running(
        self, pool: asyncpg.Pool[asyncpg.Record], work: Callable[[Running], Awaitable[None]]
    ) -> Fault | None:
        try:
            await work(Running(pool=pool, flow=self.flow, lease=LEASE))
        except Fault as fault:
            return fault
        return None

    async def pick(self, index: int) -> asyncpg.Record:
        activities = await self.activities()
        return activities[index % len(activities)]

    async def request(self, activity: UUID, number: int) -> asyncpg.Record | None:
        """Return one of the requests that an activity has sent; None before it has sent any."""
        requests = await self.jobs.connection.fetch(REQUESTS, activity)
        return requests[number % len(requests)] if requests else None

    async def room(self, work: dict[str, int]) -> dict[str, int]:
        """Let a tree end."""
        full = len(await self.activities()) + work["children"] > MOST_ACTIVITIES
        return {"children": 0, "again": 0} if full else work

    @rule(index=which, crash=crashes)
    def deliver_to_leg_1(self, index: int, crash: Crash | None) -> None:
        self.run(self.leg1(index, crash))

    async def leg1(self, index: int, crash: Crash | None) -> None:
        before, state = await self.pick(index), await self.state()
        fault = await self.working(crash, lambda running: run_leg1(running, before["id"]))
        await self.jobs.end_leases(before["id"])
        complete = digits.is_set(before["ledger"], digits.LEG1_COMPLETE)
        after = before["ledger"]
        if state == "running" and crash != Crash(0, after=False):
            after = operations.enter_leg1(after)
        if state == "running" and (crash is None or crash.commit > 1 or crash == Crash(1, after=True)):
            after = mark(after, digits.LEG1_COMPLETE)
        assert digits.render(after) == await self.jobs.activity(before["id"])
        expected = Inactive if state != "running" else Duplicate if complete else type(None)
        assert isinstance(fault, type(None) if at_entry(crash) else expected)

    @rule(index=which, message=st.integers(0, 3), work=works, crash=crashes)
    def deliver_to_leg_2(self, index: int, message: int, work: dict[str, int], crash: Crash | None) -> None:
        self.run(self.leg2(index, message, work, crash))

    async def leg2(self, index: int, message: int, work: dict[str, int], crash: Crash | None) -> None:
        before, guids, state = await self.pick(index), await self.guids(), await self.state()
        key, work = (before["id"], f"m-{message}"), await self.room(work)
        request = await self.request(before["id"], message)
        fault = await self.working(crash, lambda running: deliver(running, *key, request, work))
        await self.jobs.end_leases(before["id"])
        known = digits.decode_guid(guids[key]) if key in guids else None
        refused: type[Fault] | None = None
        if known is not None and known.done:
            refused = Duplicate
        elif state == "completed" or (state == "closed" and not (known and known.job_closed)):
            refused = Inactive
        elif not digits.is_set(before["ledger"], digits.LEG1_COMPLETE):
            refused = Forbidden
        elif known is None and (request is None or request["answered_by"] is not None):
            refused = Duplicate
        if refused is not None:
            assert isinstance(fault, type(None) if at_entry(crash) else refused)
            assert await self.guids() == guids
            assert digits.render(before["ledger"]) == await self.jobs.activity(before["id"])
            return
        assert fault is None
        if crash != Crash(0, after=False):
            entered = operations.enter_leg2(before["ledger"])
            ledger = (await self.guids())[key]
            ordinal = known.ordinal if known else digits.decode_guid(seed_guid(entered)).ordinal
            assert digits.decode_guid(ledger).ordinal == ordinal
            after = await self.pick(index) if len(await self.activities()) == 1 else None
            assert after is None or digits.decode_activity(after["ledger"]).leg2_entries == entered % 10**8
            assert digits.decode_guid(ledger).done or crash is not None

    @rule(index=which, message=st.integers(0, 1), work=works)
    def deliver_to_two_workers(self, index: int, message: int, work: dict[str, int]) -> None:
        self.run(self.both(index, message, work))

    async def both(self, index: int, message: int, work: dict[str, int]) -> None:
        activity, work = (await self.pick(index))["id"], await self.room(work)
        request = await self.request(activity, message)

        def one() -> Awaitable[Fault | None]:
            return self.working(None, lambda running: deliver(running, activity, f"m-{message}", request, work))

        faults = await asyncio.gather(one(), one())
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
            self.run(self.pool.close())
            self.runner.close()

    async def end(self) -> None:
        """Deliver all that is left, and see that each thing has happened once."""
        while await self.state() != "completed":
            assert await self.working(None, self.deliver_the_rest) is None
        guids, activities = await self.guids(), await self.activities()
        requests = [row for each in activities for row in await self.jobs.connection.fetch(REQUESTS, each["id"])]
        once = 1 if self.flow is WRITING else 0
        assert await self.effects("worked") == sorted(f"{activity}/{guid}" for activity, guid in guids) * once
        assert await self.effects("requested") == sorted(str(row["id"]) for row in requests) * once
        assert await self.effects("reported") == [str(self.job)] * once
        assert sorted(row["answered_by"] for row in requests) == sorted(guid for _, guid in guids)
        assert all(digits.decode_guid(ledger).done for ledger in guids.values())
        events = await self.jobs.events(self.job)
        assert [events.count(name) for name in ("job_started", "job_completed")] == [1, 1]
        assert events.count("activity_spawned") == len(activities)
        assert events.count("asked") == len(requests) == sum(row["answers_due"] for row in activities)

    async def deliver_the_rest(self, running: Running) -> None:
        for row in await self.activities():
            if not digits.is_set(row["ledger"], digits.LEG1_COMPLETE):
                await run_leg1(running, row["id"])
            requests = await self.jobs.connection.fetch(REQUESTS, row["id"])
            undone = {guid for activity, guid in await self.left() if activity == row["id"]}
            for request in requests:
                guid = request["answered_by"] or f"fresh-{request['id']}"
                if request["answered_by"] is None or guid in undone:
                    await deliver(running, row["id"], guid, request, {"children": 0, "again": 0})

    async def effects(self, name: str) -> list[str]:
        return sorted(row[0] for row in await self.jobs.connection.fetch(EFFECTS, self.job, name))

    async def left(self) -> list[tuple[UUID, str]]:
        return [key for key, ledger in (await self.guids()).items() if not digits.decode_guid(ledger).done]


def at_entry(crash: Crash | None) -> bool:
    """Whether the worker dies at the commit of its entry, and hears nothing of a fault."""
    return crash is not None and crash.commit == 0


async def deliver(
    running: Running, activity: UUID, guid: str, request: asyncpg.Record | None, work: dict[str, int]
) -> None:
    answer = Answer(json.dumps(work), None if request is None else request["id"])
    await run_leg2(running, activity, guid, answer)


def drive(url: str, runs: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: Trees(url),
        settings=settings(
            max_examples=runs,
            stateful_step_count=25,
            phases=(Phase.reuse, Phase.generate),  # a failure is shrunk by hand: each try costs a job
        ),
    )


def test_each_step_of_any_tree_happens_once(jobs_database: str) -> None:
    drive(jobs_database, 25)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_each_step_of_five_hundred_trees_happens_once(jobs_database: str) -> None:
    drive(jobs_database, 500)
