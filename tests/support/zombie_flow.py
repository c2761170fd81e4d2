"""A flow of many short steps, each with a row of its own, for workers that are stopped in their midst."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from postroom.flow import Context, Flow, Job, Spawn

flow = Flow("zombies")

EFFECTS: Final = "CREATE TABLE IF NOT EXISTS step_effect (job uuid, step text)"
_EFFECT: Final = "INSERT INTO step_effect (job, step) VALUES ($1, $2)"
_LONGEST: Final = 0.4  # seconds of a step


@flow.activity
async def spread(ctx: Context, request: int) -> list[Spawn]:
    """Fan out into so many steps."""
    await _take_effect(ctx, "spread")
    return [work.spawn(number) for number in range(request)]


@flow.activity
async def work(ctx: Context, request: int) -> None:
    """Take a moment between the effect and its commit."""
    await _take_effect(ctx, str(request))


@flow.completed
async def complete(ctx: Context, _job: Job) -> None:
    await _take_effect(ctx, "completed")


async def _take_effect(ctx: Context, step: str) -> None:
    connection = await ctx.connection()
    await connection.execute(_EFFECT, ctx.job, step)
    await asyncio.sleep(random.uniform(0, _LONGEST))
