"""A flow under test: its real ledger, with a crash at every commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncpg
import pytest

from postroom.flow import Context, Flow, InvalidFlow, Job, Step
from postroom.retry_policy import RetryPolicy
from postroom.testing import FlowCase

TABLES = "CREATE TABLE loaded (part int NOT NULL, key text NOT NULL)"
LOADED = "SELECT part FROM loaded ORDER BY part"
ANSWERS: Mapping[str, Any] = {"extract": lambda request: {"parts": [request["day"], request["day"] + 1]}}


def exporting(*, beside: str | None = None) -> Flow:
    """Make a flow that loads each part in its step's transaction, or by a connection to the server `beside` it."""
    flow = Flow("nightly-export")

    @flow.activity(sends="queue:extract", answer="extracted")
    async def extract(_ctx: Context, request: Any) -> Any:
        return request

    @extract.answered
    async def _(_ctx: Context, answer: Any) -> list[Step]:
        return [load.spawn(part) for part in answer["parts"]]

    @flow.activity
    async def load(ctx: Context, part: int) -> None:
        connection = await ctx.connection()
        if beside is not None:
            connection = await asyncpg.connect(beside, database=await connection.fetchval("SELECT current_database()"))
        await connection.execute("INSERT INTO loaded VALUES ($1, $2)", part, ctx.idempotency_key)
        if beside is not None:
            await connection.close()

    @flow.completed
    async def report(ctx: Context, job: Job) -> Any:
        connection = await ctx.connection()
        return {"day": job.request["day"], "parts": await connection.fetchval("SELECT count(*) FROM loaded")}

    return flow


async def test_a_flow_runs_to_its_end_with_the_answers_that_a_test_gives(database_url: str) -> None:
    async with FlowCase(exporting(), database_url, tables=TABLES, answers=ANSWERS) as case:
        run = await case.run({"day": 1}, effects=LOADED)
    assert (run.state, run.error) == ("completed", None)
    assert (run.result, run.effects) == ({"day": 1, "parts": 2}, [(1,), (2,)])


async def test_each_effect_happens_once_whatever_commit_a_worker_dies_at(database_url: str) -> None:
    async with FlowCase(exporting(), database_url, tables=TABLES, answers=ANSWERS) as case:
        run = await case.crash_at_every_commit({"day": 1}, effects=LOADED)
    assert run.commits.count("spawn") == 3
    assert run.commits[-1] == "finish_job"
    assert len(run.commits) > 10


async def test_an_effect_beside_the_transaction_that_happens_twice_is_found_and_has_one_key(database_url: str) -> None:
    async with FlowCase(exporting(beside=database_url), database_url, tables=TABLES, answers=ANSWERS) as case:
        with pytest.raises(
            AssertionError, match=r"crash right before commit \d+ \(spawn\) the effects are .*\(1,\), \(1,\)"
        ):
            await case.crash_at_every_commit({"day": 1}, effects=LOADED)
        counted = "SELECT part, count(DISTINCT key) FROM loaded GROUP BY part ORDER BY part"
        run = await case.crash_at_every_commit({"day": 1}, effects=counted)
    assert run.effects == [(1, 1), (2, 1)]


async def test_a_flow_that_fails_says_why(database_url: str) -> None:
    flow = Flow("failing")

    @flow.activity(retry_policy=RetryPolicy(max_attempts=2, backoff_ms=1))
    async def work(_ctx: Context, _request: Any) -> None:
        raise OSError("the disk is full")

    async with FlowCase(flow, database_url) as case:
        run = await case.run()
        assert (run.state, run.error) == ("failed", "OSError: the disk is full (attempt 2 of 2)")
        with pytest.raises(AssertionError, match=r"the job is failed without any crash: .*the disk is full"):
            await case.crash_at_every_commit(effects=lambda _: _nothing())


async def test_a_step_has_the_settings_and_the_limits_that_a_worker_gives_it(database_url: str) -> None:
    flow, shown = Flow("strict"), "SELECT setting FROM pg_settings WHERE name = ANY ($1) ORDER BY name"
    seen: list[list[str]] = []

    @flow.activity
    async def look(ctx: Context, _request: Any) -> Step:
        connection = await ctx.connection()
        rows = await connection.fetch(shown, ["TimeZone", "lock_timeout", "search_path", "statement_timeout"])
        seen.append([row["setting"] for row in rows])
        await connection.execute("SET search_path = elsewhere")
        return ask.spawn() if len(seen) > 1 else look.again()

    @flow.activity(sends="queue:work", retry_policy=RetryPolicy(max_attempts=1))
    async def ask(_ctx: Context, _request: Any) -> str:
        return "x" * 8 * 1024 * 1024

    @ask.answered
    async def _(_ctx: Context, _answer: Any) -> None: ...

    async with FlowCase(flow, database_url) as case:
        run = await case.run()
    assert seen == [["UTC", "10000", '"$user", public', "15000"]] * 2
    assert run.state == "failed"
    assert "the request of 'ask' has 8388610 bytes, NATS accepts 8372224" in (run.error or "")


async def _nothing() -> None:
    pass


async def test_a_request_that_nobody_answers_is_named(database_url: str) -> None:
    async with FlowCase(exporting(), database_url) as case:
        with pytest.raises(AssertionError, match="'extract' asks queue:extract: give the case answers="):
            await case.run({"day": 1})


@pytest.mark.parametrize("answer", [float("nan"), "\0", object()])
async def test_an_answer_that_no_message_can_have_is_refused(database_url: str, answer: Any) -> None:
    async with FlowCase(exporting(), database_url, answers={"extract": lambda _: answer}) as case:
        with pytest.raises(InvalidFlow, match=r"the answer for 'extract' (contains|cannot be written)"):
            await case.run({"day": 1})


async def test_its_databases_are_gone_in_the_end(database_url: str) -> None:
    async with FlowCase(exporting(), database_url, tables=TABLES, answers=ANSWERS) as case:
        await case.run({"day": 1})
    connection = await asyncpg.connect(database_url)
    assert await connection.fetch("SELECT FROM pg_database WHERE datname LIKE 'postroom_case%'") == []
    await connection.close()
    with pytest.raises(InvalidFlow, match="has no activity"):
        FlowCase(Flow("empty"), database_url)
