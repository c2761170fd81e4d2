"""What the authors of handlers get wrong: each is an attempt that failed, with a reason, and the worker goes on."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias
from uuid import uuid4

import asyncpg
import pytest
from support.ledgers import LEASE, Jobs

from postroom.chassis.postgres import close_pool, open_pool
from postroom.flow import Context, Flow, InvalidFlow, Job
from postroom.ledger.engine import Engine, TryLater
from postroom.ledger.errors import LeaseLost
from postroom.ledger.legs import Running, run_leg1, run_leg2
from postroom.ledger.primitives import Answer, Start, complete_leg1, enter_leg1, spawn, start_job
from postroom.retry_policy import RetryPolicy

Wrong = Callable[[Context], Awaitable[Any]]

flow = Flow("careless")


@flow.activity
async def work(ctx: Context, request: str) -> Any:
    return await WRONG[request][0](ctx)


async def half_a_character(_ctx: Context) -> None:
    raise ValueError("a\0b \ud800")


async def leaves(_ctx: Context) -> None:
    sys.exit(3)


async def cancels_itself(_ctx: Context) -> None:
    raise asyncio.CancelledError


async def cancels_its_task(_ctx: Context) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def raises_no_exception(_ctx: Context) -> None:
    raise BaseException("odd")  # noqa: TRY002 - as somebody else's library may


async def commits(ctx: Context) -> None:
    await (await ctx.connection()).execute("COMMIT")


async def rolls_back(ctx: Context) -> None:
    await (await ctx.connection()).execute("ROLLBACK")


async def loses_its_connection(ctx: Context) -> None:
    connection = await ctx.connection()
    with suppress(asyncpg.PostgresError):
        await connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    raise ValueError("no day")


async def goes_on_after_an_error(ctx: Context) -> None:
    with suppress(asyncpg.UndefinedTableError):
        await (await ctx.connection()).execute("INSERT INTO nowhere VALUES (1)")


async def goes_on_and_asks(ctx: Context) -> None:
    await goes_on_after_an_error(ctx)
    await (await ctx.connection()).execute("SELECT 1")


async def spawns_a_set(_ctx: Context) -> Any:
    return work.spawn({1, object()})


async def spawns_infinity(_ctx: Context) -> Any:
    return work.spawn([1.5, float("inf")])


async def spawns_half_a_character(_ctx: Context) -> Any:
    return work.spawn("\ud800")


async def spawns_a_nul(_ctx: Context) -> Any:
    return work.spawn({"escaped": "\\u0000", "not": "\\\0"})


WRONG: dict[str, tuple[Wrong, str]] = {
    "half_a_character": (half_a_character, r"ValueError: a\x00b \ud800"),
    "leaves": (leaves, "HandlerEnded: the handler ended with SystemExit: 3"),
    "cancels_itself": (cancels_itself, "HandlerEnded: the handler ended with CancelledError"),
    "cancels_its_task": (cancels_its_task, "HandlerEnded: the handler ended with CancelledError"),
    "raises_no_exception": (raises_no_exception, "HandlerEnded: the handler ended with BaseException: odd"),
    "loses_its_connection": (loses_its_connection, "ValueError: no day"),
    "commits": (commits, "InvalidFlow: the handler ended the transaction of its step"),
    "rolls_back": (rolls_back, "InvalidFlow: the handler ended the transaction of its step"),
    "goes_on_after_an_error": (goes_on_after_an_error, "InvalidFlow: a statement on `ctx.connection()` failed"),
    "goes_on_and_asks": (goes_on_and_asks, "InvalidFlow: a statement on `ctx.connection()` failed"),
    "spawns_a_set": (spawns_a_set, "InvalidFlow: what 'work' is spawned with cannot be written as JSON"),
    "spawns_infinity": (spawns_infinity, "InvalidFlow: what 'work' is spawned with cannot be written as JSON"),
    "spawns_a_nul": (spawns_a_nul, "InvalidFlow: what 'work' is spawned with contains a NUL character"),
    "spawns_half_a_character": (
        spawns_half_a_character,
        "InvalidFlow: what 'work' is spawned with cannot be written as JSON",
    ),
}


Pool: TypeAlias = "asyncpg.Pool[asyncpg.Record]"


@pytest.fixture
async def pool(jobs_database: str) -> AsyncIterator[Pool]:
    async with asyncpg.create_pool(jobs_database, min_size=1, max_size=2) as pool:
        yield pool


@pytest.mark.parametrize("wrong", WRONG)
async def test_whatever_a_handler_does_its_attempt_has_failed_and_says_why(jobs: Jobs, pool: Pool, wrong: str) -> None:
    start = Start(uuid4(), "sea", "careless", uuid4(), "work", json.dumps(wrong))
    await start_job(jobs.connection, start)
    with pytest.raises(TryLater) as later:
        await Engine(pool, flow, lease=LEASE).spawned(start.root, "work", "spawned")
    assert str(later.value).startswith(WRONG[wrong][1])
    kept = "SELECT last_error, owner FROM ledger.guid WHERE activity_id = $1"
    row = await jobs.connection.fetchrow(kept, start.root)
    assert row is not None
    assert (row["last_error"], row["owner"]) == (str(later.value), None)
    assert await jobs.job(start.job) == ("running", 1)


@pytest.mark.parametrize("early", [False, True])
async def test_what_a_handler_leaves_running_is_given_no_connection_after_its_step(
    jobs: Jobs, pool: Pool, *, early: bool
) -> None:
    """As the rest of a `gather` of which one has raised."""
    left_behind = Flow("left-behind")
    ended = asyncio.Event()
    left: list[asyncio.Task[Any]] = []

    @left_behind.activity
    async def work(ctx: Context, _request: Any) -> None:
        async def rest() -> Any:
            if not early:
                await ended.wait()
            return await ctx.connection()

        left.append(asyncio.create_task(rest()))
        if early:
            await asyncio.sleep(0)  # it waits for a connection, and gets one behind the end
        raise ValueError("one of them")

    start = Start(uuid4(), "sea", left_behind.name, uuid4(), "work", "null")
    await start_job(jobs.connection, start)
    with pytest.raises(TryLater, match="one of them"):
        await Engine(pool, left_behind, lease=LEASE).spawned(start.root, "work", "spawned")
    ended.set()
    if early:
        assert (await asyncio.gather(*left, return_exceptions=True))[0] is not None
    else:
        with pytest.raises(InvalidFlow, match="after its step had ended"):
            await left[0]
    assert pool.get_size() == pool.get_idle_size()


async def test_what_a_handler_sets_or_locks_in_its_session_ends_with_its_step(jobs: Jobs, jobs_database: str) -> None:
    unclean, seen = Flow("unclean"), list[Any]()

    @unclean.activity
    async def work(ctx: Context, _request: Any) -> None:
        connection = await ctx.connection()
        seen.append(await connection.fetchval("SELECT current_setting('search_path')"))
        await connection.execute("SET search_path = elsewhere; SET default_transaction_read_only = on")
        await connection.execute("SELECT pg_advisory_lock(17)")

    pool = await open_pool(jobs_database, name="test", connections=1)
    engine = Engine(pool, unclean, lease=LEASE)
    for _ in range(2):
        start = Start(uuid4(), "sea", unclean.name, uuid4(), "work", "null")
        await start_job(jobs.connection, start)
        await engine.spawned(start.root, "work", "spawned")
        assert await jobs.job(start.job) == ("completed", 0)
    assert seen == ['"$user", public'] * 2
    assert await jobs.connection.fetchval("SELECT pg_try_advisory_lock(17)")
    await close_pool(pool)


@pytest.mark.parametrize("step", ["leg 1", "leg 2", "completion"])
async def test_a_handler_whose_lease_is_over_before_it_begins_is_not_called(jobs: Jobs, pool: Pool, step: str) -> None:
    late, called = Flow("late"), list[str]()

    @late.activity(sends="queue:work" if step == "leg 1" else None)
    async def work(_ctx: Context, _request: Any) -> None:
        called.append("work")

    @late.completed
    async def report(_ctx: Context, _job: Job) -> None:
        called.append("completion")

    start = Start(uuid4(), "sea", late.name, uuid4(), "work", "null")
    await start_job(jobs.connection, start)
    running = Running(pool=pool, flow=late, lease=timedelta(microseconds=1))
    if step == "leg 1":
        leg = run_leg1(running, start.root)
    else:
        await complete_leg1(jobs.connection, await enter_leg1(jobs.connection, start.root, LEASE))
        if step == "completion":
            await spawn(jobs.connection, await jobs.enter(start.root))
            await jobs.end_leases(start.root)
        leg = run_leg2(running, start.root, "m-1", Answer("null"))
    with pytest.raises(LeaseLost):
        await leg
    gc.collect()  # a coroutine that was never awaited would be found here
    assert called == []


async def test_a_completion_that_returns_no_json_says_so(jobs: Jobs, pool: Pool) -> None:
    reporting = Flow("reporting")

    @reporting.activity
    async def nothing(_ctx: Context, _request: Any) -> None: ...

    @reporting.completed(retry_policy=RetryPolicy(max_attempts=1))
    async def report(_ctx: Context, _job: Job) -> Any:
        return object()

    start = Start(uuid4(), "sea", "reporting", uuid4(), "nothing")
    await start_job(jobs.connection, start)
    await Engine(pool, reporting, lease=LEASE).spawned(start.root, "nothing", "spawned")
    error = await jobs.connection.fetchval("SELECT error FROM ledger.job WHERE id = $1", start.job)
    assert error.startswith("the completion: InvalidFlow: what it returned cannot be written as JSON")


@pytest.mark.parametrize("what", ["request", "again", "result"])
async def test_what_is_larger_than_a_message_may_be_fails_its_step(jobs: Jobs, pool: Pool, what: str) -> None:
    growing, large = Flow("growing"), {"many": [0] * 400}
    size = len(json.dumps(large))  # with blanks, as Postgres writes it
    once = RetryPolicy(max_attempts=1)

    @growing.activity(sends="queue:work" if what == "request" else None, retry_policy=once)
    async def grow(_ctx: Context, _request: Any) -> Any:
        if what == "again":
            return grow.again(large)
        return large if what == "request" else None

    if what == "request":
        grow.answered(nothing_more)

    @growing.completed(retry_policy=once)
    async def report(_ctx: Context, _job: Job) -> Any:
        return large

    start = Start(uuid4(), "sea", "growing", uuid4(), "grow")
    await start_job(jobs.connection, start)
    engine = Engine(pool, growing, lease=LEASE)
    engine.limit(size - 1)
    await engine.spawned(start.root, "grow", "spawned")
    job = await jobs.connection.fetchrow("SELECT state, error FROM ledger.job WHERE id = $1", start.job)
    assert job is not None
    assert job["state"] == "failed"
    assert f"has {size} bytes, NATS accepts {size - 1}" in job["error"]


async def nothing_more(_ctx: Context, _answer: Any) -> None: ...
