"""A job that fans out and in: an agent says which parts a day has, each part is loaded once, and a report is made once.

    postroom up                                                    # then, with the `env` file that it names:
    postroom worker run --flow nightly_export:flow                 # in this folder
    postroom agent run nightly_export:Extract --tenant demo
    postroom jobs start nightly_export:flow --mesh demo --request '{"day": "2026-01-31", "parts": 4}'

`postroom jobs tree` shows how far it is. Workers and agents may be killed at any moment: whatever a step writes to
Postgres, it writes once.
"""

from __future__ import annotations

from typing import Any

from postroom.agent import Agent, Emit, Envelope
from postroom.flow import Context, Flow, Job, Spawn

flow = Flow("nightly-export")


@flow.activity(sends="queue:extract", timeout=60, asks=3)
async def extract(ctx: Context, request: Any) -> Any:
    """Ask the agent which parts the day has."""
    connection = await ctx.connection()
    await connection.execute("CREATE TABLE IF NOT EXISTS exported_part (job uuid, part int, rows int)")
    return {"day": request["day"], "parts": request["parts"]}


@extract.answered
async def _(_ctx: Context, answer: Any) -> list[Spawn]:
    """Fan out: load each part."""
    return [load.spawn({"part": part, "rows": rows}) for part, rows in enumerate(answer["rows"])]


@flow.activity
async def load(ctx: Context, request: Any) -> None:
    """Load one part: its row is committed together with the step."""
    connection = await ctx.connection()
    row = "INSERT INTO exported_part (job, part, rows) VALUES ($1, $2, $3)"
    await connection.execute(row, ctx.job, request["part"], request["rows"])


@flow.completed
async def report(ctx: Context, job: Job) -> Any:
    """Fan in: once per job, when every part is loaded; what is returned is in the event `job_completed`."""
    connection = await ctx.connection()
    total = "SELECT count(*) AS parts, coalesce(sum(rows), 0) AS rows FROM exported_part WHERE job = $1"
    row = await connection.fetchrow(total, job.id)
    return {"day": job.request["day"], "parts": row["parts"], "rows": row["rows"]}


class Extract(Agent):
    """Takes the requests; whatever it emits for one is the answer to it."""

    subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)

    async def receive(self, envelope: Envelope) -> Emit:
        """Say how many rows each part has."""
        return Emit("day_extracted", {"rows": [100 + part for part in range(envelope.payload["parts"])]})
