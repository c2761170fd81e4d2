"""Consumers forget what they have handled, once it cannot come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from support.clocks import clock_ahead
from support.jetstream import Context

from postroom.chassis.postgres import Pool, migrate
from postroom.delivery import ROOM
from postroom.delivery.http.inbox_messages import InboxRetention, open_inbox_pool
from postroom.delivery.settings import InboxSettings

DURABLE = "billing"


@pytest.fixture
async def pool(database_url: str) -> AsyncIterator[Pool]:
    await migrate(database_url, ROOM)
    pool = await open_inbox_pool(database_url, name="retention-tests", connections=2)
    yield pool
    await pool.close()


async def put(pool: Pool, name: str, days: float, ended: str | None, consumer: str = DURABLE) -> None:
    """Put a row that was received, and ended, so many days ago."""
    columns = f", {ended}" if ended else ""
    values = ", now() - $4 * interval '1 day'" if ended else ""
    reason = (", dead_reason", ", 'poison'") if ended == "dead_at" else ("", "")
    await pool.execute(
        "INSERT INTO postroom.inbox_messages (consumer, source_context, message_id, subject, received_at"  # noqa: S608
        f"{columns}{reason[0]}) VALUES ($1, $2, $3, 'any', now() - $4 * interval '1 day'{values}{reason[1]})",
        consumer, "demo", name, days,
    )  # fmt: skip


async def left(pool: Pool) -> set[str]:
    return {row[0] for row in await pool.fetch("SELECT message_id FROM postroom.inbox_messages")}


def retention(pool: Pool, context: Context, **changes: Any) -> InboxRetention:
    stream = changes.pop("stream", context.events)
    return InboxRetention(pool, context.js, stream=stream, durable=DURABLE, settings=InboxSettings(**changes))


async def test_what_ended_long_ago_goes_and_what_waits_or_is_younger_or_anothers_stays(
    pool: Pool, context: Context
) -> None:
    await put(pool, "old", 31, "processed_at")
    await put(pool, "dead", 31, "dead_at")
    await put(pool, "young", 29, "processed_at")
    await put(pool, "waiting", 31, None)
    await put(pool, "anothers", 31, "processed_at", "another")

    assert await retention(pool, context).sweep() == 2
    assert await left(pool) == {"young", "waiting", "anothers"}


async def test_nothing_goes_by_a_clock_that_is_ahead(pool: Pool, context: Context) -> None:
    await put(pool, "old", 31, "processed_at")
    sweeper = retention(pool, context)
    sweeper._clock = clock_ahead()
    assert await sweeper.sweep() == 0


async def test_a_sweep_goes_in_slices_until_nothing_is_left(pool: Pool, context: Context) -> None:
    for number in range(7):
        await put(pool, f"m{number}", 31, "processed_at")
    sweeper = retention(pool, context, sweep_rows=3)
    assert (await sweeper.sweep(), await sweeper.sweep(), sweeper.swept) == (7, 0, 7)


async def test_a_row_stays_for_as_long_as_its_stream_may_hold_the_message(pool: Pool, context: Context) -> None:
    await context.publish(["first"])
    await put(pool, "handled", 0, "processed_at")
    sweeper = retention(pool, context, keep_days=1e-9)
    assert await sweeper.sweep() == 0
    await context.js.purge_stream(context.events)
    assert await sweeper.sweep() == 1


async def test_nothing_goes_while_the_stream_is_not_there(pool: Pool, context: Context) -> None:
    await put(pool, "old", 31, "processed_at")
    assert await retention(pool, context, stream="NOBODYS").sweep() == 0


async def test_a_row_stays_for_as_long_as_its_work_queue_has_not_heard_of_it(pool: Pool, context: Context) -> None:
    """A consumer may be killed between its last commit and the acknowledgement, and stay away for months."""
    commands = context.streams[1]
    await context.publish(["first"], subject=f"cmd.{context.name}.default.work.run")
    await put(pool, "first", 0, "processed_at")
    sweeper = retention(pool, context, stream=commands.name, keep_days=1e-9)
    assert await sweeper.sweep() == 0
    await context.js.purge_stream(commands.name)
    assert await sweeper.sweep() == 1


async def test_what_a_work_queue_waits_for_keeps_nothing_older(pool: Pool, context: Context) -> None:
    commands = context.streams[1]
    await context.publish(["first"], subject=f"cmd.{context.name}.default.work.run")
    await put(pool, "old", 31, "processed_at")
    assert await retention(pool, context, stream=commands.name).sweep() == 1


async def test_a_sweeper_ends_though_a_sweep_swallows_the_cancellation(
    pool: Pool, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper, begun = retention(pool, context), asyncio.Event()

    async def sweep() -> int:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        return 0

    monkeypatch.setattr(sweeper, "sweep", sweep)
    running = asyncio.create_task(sweeper.run())
    await begun.wait()
    running.cancel()
    await asyncio.wait({running}, timeout=10)
    assert running.cancelled()
