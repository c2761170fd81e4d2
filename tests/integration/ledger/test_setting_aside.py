"""What becomes of messages for activities that the worker which takes them does not have."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from support.ledgers import LEASE, Jobs

from postroom._wire.jobs import JobFilter
from postroom.flow import Context, Flow
from postroom.ledger.engine import Engine, TryLater
from postroom.ledger.operations import cancel_job, count_jobs, find_jobs, retry_job, show_job
from postroom.ledger.primitives import Answer, Start, fail_activity, start_job
from postroom.retry_policy import RetryPolicy

ASKED = "SELECT id FROM ledger.request WHERE activity_id = $1"
OVERDUE = "UPDATE ledger.request SET due_at = now() - interval '1 second' WHERE activity_id = $1"
BROUGHT = (
    "SELECT event_type, payload::text FROM postroom.outbox_events"
    " WHERE correlation_id = $1 AND published_at IS NULL ORDER BY position"
)
WAITS = "the worker post/1 has no activity {!r}: the name is misspelt or was changed, or it runs an older version"


def flow_with(*names: str) -> Flow:
    """A flow of activities that work, and of `ask`, which sends."""
    flow = Flow("deployed")
    for name in names:

        async def work(ctx: Context, request: Any) -> None:
            if request == "broken":
                raise OSError(f"attempt {ctx.attempt}")

        flow.activity(name=name, retry_policy=RetryPolicy(max_attempts=2, backoff_ms=1))(work)

    @flow.activity(sends="queue:pages", answer="paged", timeout=60)
    async def ask(_ctx: Context, request: Any) -> Any:
        return request

    @ask.answered
    async def _(_ctx: Context, _answer: Any) -> None: ...

    return flow


class Deployment:
    """An old worker, which lacks everything but `load`, and a new one, of one database."""

    def __init__(self, jobs: Jobs, pool: asyncpg.Pool[asyncpg.Record]) -> None:
        self.jobs = jobs
        only_load = Flow("deployed")
        only_load.activity(name="load")(next(iter(flow_with("load").activities.values())).leg2)  # type: ignore[arg-type]
        self.old = Engine(pool, only_load, lease=LEASE, worker="post/1")
        self.new = Engine(pool, flow_with("load", "count"), lease=LEASE, worker="post/2")

    async def begin(self, name: str, request: Any = None) -> Start:
        await self.jobs.publish()
        start = Start(uuid4(), "sea", "deployed", uuid4(), name, json.dumps(request))
        await start_job(self.jobs.connection, start)
        await self.jobs.publish()
        return start

    async def asked(self) -> tuple[Start, UUID]:
        """Begin a job that waits for an answer."""
        start = await self.begin("ask")
        await self.new.spawned(start.root, "ask", "spawned")
        await self.jobs.publish()
        return start, await self.jobs.connection.fetchval(ASKED, start.root)

    async def brought(self, start: Start) -> list[tuple[str, dict[str, Any]]]:
        """List what goes out for a job, and was not there before."""
        rows = await self.jobs.connection.fetch(BROUGHT, start.job)
        await self.jobs.publish()
        return [(row[0], json.loads(row[1])) for row in rows]

    async def step(self, start: Start) -> tuple[str, str | None, str]:
        """Return how a job's root looks to an operator."""
        (activity,) = (await show_job(self.jobs.connection, start.job)).activities
        return activity.state, activity.error, activity.ledger


@pytest.fixture
async def deployment(jobs: Jobs, jobs_database: str) -> AsyncIterator[Deployment]:
    await jobs.connection.execute("TRUNCATE ledger.set_aside")
    async with asyncpg.create_pool(jobs_database, min_size=1, max_size=4) as pool:
        yield Deployment(jobs, pool)


async def test_what_a_worker_does_not_know_waits_without_an_attempt_and_says_for_what(deployment: Deployment) -> None:
    start = await deployment.begin("count")
    for _ in range(30):
        await deployment.old.spawned(start.root, "count", "spawned")
    state, error, ledger = await deployment.step(start)
    assert (state, ledger) == ("unknown", "000000000000000")
    assert error is not None
    assert error.startswith(WAITS.format("count"))
    (listed,) = await find_jobs(deployment.jobs.connection, JobFilter(flow="deployed", state="running"), 1)
    assert (listed.id, listed.unknown) == (start.job, ["count"])
    assert deployment.old.counters.set_aside == 30
    counts = await count_jobs(deployment.jobs.connection)
    assert counts.unknown == 1
    assert counts.running >= 1


async def test_it_goes_on_as_soon_as_a_worker_is_there_that_knows_it(deployment: Deployment) -> None:
    start = await deployment.begin("count")
    await deployment.old.spawned(start.root, "count", "spawned")
    await deployment.old.bring_back()
    assert await deployment.brought(start) == []
    await deployment.new.bring_back()
    ((event, body),) = await deployment.brought(start)
    assert (event, body["guid"], body["name"]) == ("activity_spawned", "spawned", "count")

    await deployment.new.bring_back()
    assert await deployment.brought(start) == []
    await deployment.new.spawned(start.root, "count", "spawned")
    assert (await deployment.step(start))[:2] == ("done", None)
    assert await deployment.jobs.job(start.job) == ("completed", 0)


async def test_an_answer_waits_whole_and_its_request_is_not_overdue_meanwhile(deployment: Deployment) -> None:
    start, request = await deployment.asked()
    await deployment.old.answered(start.root, "ask", "m-1", Answer('{"rows": 1}', request, "paged"))
    await deployment.jobs.connection.execute(OVERDUE, start.root)
    await deployment.new.ask_again("sea", None)
    assert await deployment.jobs.job(start.job) == ("running", 1)

    await deployment.new.bring_back()
    ((event, body),) = await deployment.brought(start)
    assert event == "activity_retried"
    expected = {"guid": "m-1", "answer": {"rows": 1}, "request": str(request), "event": "paged"}
    assert {name: body[name] for name in expected} == expected
    await deployment.new.ask_again("sea", None)
    assert await deployment.jobs.job(start.job) == ("running", 1)


async def test_a_message_that_is_done_or_whose_job_has_ended_is_only_acknowledged(deployment: Deployment) -> None:
    done, request = await deployment.asked()
    await deployment.new.answered(done.root, "ask", "m-1", Answer("1", request, "paged"))
    await deployment.old.answered(done.root, "ask", "m-1", Answer("1", request, "paged"))
    ended = await deployment.begin("count")
    await cancel_job(deployment.jobs.connection, ended.job, actor="olga", reason="the wrong day")
    await deployment.old.spawned(ended.root, "count", "spawned")
    await deployment.old.spawned(uuid4(), "count", "spawned")
    assert (deployment.old.counters.set_aside, deployment.old.counters.acknowledged) == (0, 3)


async def test_a_cancelled_job_has_nothing_brought_back_and_is_no_longer_told_of(deployment: Deployment) -> None:
    start = await deployment.begin("count")
    await deployment.old.spawned(start.root, "count", "spawned")
    await cancel_job(deployment.jobs.connection, start.job, actor="olga", reason="the wrong day")
    await deployment.brought(start)
    await deployment.new.bring_back()
    assert await deployment.brought(start) == []
    assert (await deployment.step(start))[:2] == ("stopped", None)
    assert (await count_jobs(deployment.jobs.connection)).unknown == 0


async def test_what_is_set_aside_of_a_failed_job_goes_on_after_its_retry(deployment: Deployment) -> None:
    start, request = await deployment.asked()
    await fail_activity(deployment.jobs.connection, start.root, "the disk is full")
    await deployment.old.answered(start.root, "ask", "m-1", Answer("1", request, "paged"))
    await deployment.brought(start)
    await deployment.new.bring_back()
    assert await deployment.brought(start) == []

    await retry_job(deployment.jobs.connection, start.job, actor="olga", reason="mended")
    await deployment.brought(start)
    await deployment.new.bring_back()
    assert [event for event, _ in await deployment.brought(start)] == ["activity_retried"]


async def test_attempts_that_failed_before_count_on_after_it_was_set_aside(deployment: Deployment) -> None:
    start = await deployment.begin("count", "broken")
    with pytest.raises(TryLater, match="OSError: attempt 1"):
        await deployment.new.spawned(start.root, "count", "spawned")
    await deployment.old.spawned(start.root, "count", "spawned")
    await deployment.new.bring_back()
    await deployment.new.spawned(start.root, "count", "spawned")
    assert await deployment.jobs.job(start.job) == ("failed", 1)


async def test_a_completion_that_is_due_is_not_lost_to_a_worker_without_the_activity(deployment: Deployment) -> None:
    start = await deployment.begin("count")
    finish = deployment.new.flow.completed

    @finish(retry_policy=RetryPolicy(max_attempts=5, backoff_ms=1))
    async def _(ctx: Context, _job: object) -> None:
        if ctx.attempt == 1:
            raise OSError("no paper")

    with pytest.raises(TryLater, match="no paper"):
        await deployment.new.spawned(start.root, "count", "spawned")
    await deployment.old.spawned(start.root, "count", "spawned")
    assert await deployment.jobs.job(start.job) == ("closed", 0)
    await deployment.new.bring_back()
    assert [event for event, _ in await deployment.brought(start)] == ["activity_spawned"]
