"""Random jobs that fail again and again, each time at another place, and are let go on: nothing that is owed is lost.

A worker in miniature takes what the outbox has, in any order, and acknowledges what it is refused.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any
from uuid import UUID, uuid4

import pytest
from support.ledgers import LEASE, Jobs, asking

from postroom.ledger.errors import Duplicate, Fault, Reaction
from postroom.ledger.operations import retry_job, show_job
from postroom.ledger.primitives import (
    Answer,
    Child,
    complete_leg1,
    enter_leg1,
    enter_leg2,
    fail_activity,
    finish_job,
    spawn,
)

MOST_ACTIVITIES = 12
MOST_CYCLES = 4
MOST_FAILURES = 6
WORKED = "SELECT postroom.emit('sea', 'effect', $2, 'worked', '{}', correlation_id => $1)"
EFFECTS = "SELECT aggregate_id FROM postroom.outbox_events WHERE correlation_id = $1 AND event_type = 'worked'"
MESSAGES = "SELECT activity_id || '/' || guid FROM ledger.guid WHERE job_id = $1"


class Failing(Exception):
    """A handler raised for the last time."""


class Crashing(Exception):
    """The worker is gone: its message is delivered again."""


class Worker:
    """Runs one job, whose handlers raise where the dice say so; a `count` sends nothing and answers itself."""

    def __init__(self, jobs: Jobs, job: UUID, dice: Random) -> None:
        self.jobs, self.connection, self.job, self.dice = jobs, jobs.connection, job, dice
        self.failures = 0
        self.cycles = 0
        self.waiting: list[Any] = []

    def may_fail(self) -> None:
        if self.failures < MOST_FAILURES and self.dice.random() < 0.25:
            self.failures += 1
            raise Failing

    async def run(self) -> None:
        """Take messages until there are none."""
        while True:
            self.waiting += [each for each in await self.jobs.publish() if each["aggregate_type"] == "activity"]
            if not self.waiting:
                return
            await self.take(self.waiting.pop(self.dice.randrange(len(self.waiting))))

    async def take(self, message: Any) -> None:
        activity = UUID(message["aggregate_id"])
        try:
            await self.handle(activity, message)
        except Failing:
            await fail_activity(self.connection, activity, "the dice")
        except Crashing:
            await self.jobs.end_leases(activity)
            self.waiting.append(message)
        except Fault as fault:
            if fault.reaction is not Reaction.ACKNOWLEDGE:
                raise

    async def handle(self, activity: UUID, message: Any) -> None:
        said, guid = json.loads(message["payload"]), str(message["id"])
        match message["event_type"]:
            case "activity_spawned":
                await self.begin(activity, said["name"], guid)
            case "activity_cycled":
                await self.leg2(activity, guid, Answer(json.dumps(said["request"])))
            case "activity_retried":
                request = said["request"] and UUID(said["request"])
                await self.leg2(activity, said["guid"], Answer(json.dumps(said["answer"]), request))
            case "asked":
                await self.leg2(activity, f"answer-{guid}", Answer('"it"', message["id"]))

    async def begin(self, activity: UUID, name: str, guid: str) -> None:
        try:
            leg1 = await enter_leg1(self.connection, activity, LEASE)
            self.may_fail()
            await complete_leg1(self.connection, leg1, None if name == "count" else asking())
        except Duplicate:
            if name != "count":
                raise
        if name == "count":
            if self.dice.random() < 0.2:
                raise Crashing
            await self.leg2(activity, guid, Answer('"it"'))

    async def leg2(self, activity: UUID, guid: str, answer: Answer) -> None:
        assert answer.body == '"it"'
        entry = await enter_leg2(self.connection, activity, guid, LEASE, answer)
        self.may_fail()
        closed = entry.steps.job_closed
        if not entry.steps.children_spawned:
            children, again = await self.children(), self.again()
            async with self.connection.transaction():
                await self.connection.execute(WORKED, self.job, f"{activity}/{guid}")
                closed = (await spawn(self.connection, entry, children, again)).threshold_hit
        if closed:
            self.may_fail()
            await finish_job(self.connection, entry)

    async def children(self) -> list[Child]:
        room = MOST_ACTIVITIES - len((await show_job(self.connection, self.job)).activities)
        names = self.dice.choices(("load", "count"), k=self.dice.randint(0, 3))
        return [Child(uuid4(), name) for name in names[: max(room, 0)]]

    def again(self) -> list[str]:
        more = self.cycles < MOST_CYCLES and self.dice.random() < 0.3
        self.cycles += more
        return ['"it"'] * more


@pytest.mark.parametrize("seed", range(25))
async def test_a_job_that_is_let_go_on_ends_with_each_step_done_once(jobs: Jobs, seed: int) -> None:
    await jobs.publish()  # what other tests left
    begun = await jobs.begin()
    worker = Worker(jobs, begun.job, Random(seed))
    await worker.run()
    while (await jobs.job(begun.job))[0] == "failed":
        await retry_job(jobs.connection, begun.job, actor="olga", reason="once more")
        await worker.run()

    shown = await show_job(jobs.connection, begun.job)
    assert (shown.job.state, shown.job.open) == ("completed", 0)
    assert {step.state for step in shown.activities} == {"done"}
    assert len(shown.log) == worker.failures
    effects = sorted(row[0] for row in await jobs.connection.fetch(EFFECTS, begun.job))
    assert effects == sorted(row[0] for row in await jobs.connection.fetch(MESSAGES, begun.job))
    assert len(effects) == len(shown.activities) + worker.cycles
    assert (await jobs.events(begun.job)).count("job_completed") == 1
