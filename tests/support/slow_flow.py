"""A flow whose one step works until a file is there, for workers that are stopped or killed in its midst."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from postroom.flow import Context, Flow, Job

flow = Flow("slow")

EFFECT = "SELECT postroom.emit($1, 'effect', $2, $3, '{}')"


@flow.activity
async def work(ctx: Context, request: dict[str, str]) -> None:
    """Note who works, and go on once the test says so."""
    connection = await ctx.connection()
    await connection.execute(EFFECT, ctx.mesh, str(os.getpid()), "worked")
    Path(request["begun"]).touch()
    while not Path(request["go_on"]).exists():  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.01)


@flow.completed
async def report(ctx: Context, job: Job) -> None:
    """Die in the first try, which comes right after the commit that closed the job."""
    killed = job.request.get("killed")
    if killed is not None and not Path(killed).exists():
        Path(killed).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    connection = await ctx.connection()
    await connection.execute(EFFECT, ctx.mesh, str(ctx.job), "reported")
