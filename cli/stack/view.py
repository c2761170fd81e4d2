"""What `up` started, as `status` shows it: every process, its place and its backlog."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from cli.stack.stack import Stack
from cli.stack.supervisor import supervisor_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from embedded import EmbeddedServer, ProcessIdentity

_ANSWER_SECONDS: Final = 2.0


async def look_at(stack: Stack) -> list[dict[str, Any]]:
    """Return a row for the supervisor and for each process; what is not `running` is not well."""
    rows = [_row("up", supervisor_of(stack.layout), str(stack.layout.state))]
    rows += await asyncio.gather(*(_program(stack, program) for program in stack.programs))
    if rows[0]["state"] == "running":
        for program, row in zip(stack.programs, rows[1:], strict=True):
            if row["state"] == "stopped":
                row["problem"] = f"it ended, and is started again; see {program.log_file}"
    return rows


def _row(name: str, process: ProcessIdentity | None, address: str) -> dict[str, Any]:
    if process is None:
        return {"process": name, "state": "stopped"}
    return {"process": name, "state": "running", "pid": process.pid, "address": address}


async def _program(stack: Stack, program: EmbeddedServer) -> dict[str, Any]:
    row = _row(program.name, program.process, program.address)
    asking = {stack.daemon: _rows, stack.worker: _unpublished, stack.broker: _health}
    through_broker = {stack.nats: _dead_letters, stack.postgres: _jobs}
    if row["state"] == "running" and program in asking:
        row |= await _answer(asking[program](stack))
    if row["state"] == "running" and program in through_broker:
        row |= await _answer(through_broker[program](stack), of_the_broker=True)
    return row


async def _answer(asked: Awaitable[dict[str, Any]], *, of_the_broker: bool = False) -> dict[str, Any]:
    """Wait for what to show; what to say instead where there is no answer in time, or an error for one.

    That a broker does not answer is said in its own row, and says nothing of the servers that it was asked about.
    """
    from postroom import PostroomError, Unavailable  # noqa: PLC0415

    try:
        return await asyncio.wait_for(asked, _ANSWER_SECONDS)
    except (TimeoutError, Unavailable) as error:
        if of_the_broker:
            return {}
        return {"state": "silent"} if isinstance(error, TimeoutError) else {"state": "failing", "problem": str(error)}
    except PostroomError as error:
        return {"state": "failing", "problem": str(error)}


async def _rows(stack: Stack) -> dict[str, Any]:
    """Ask the daemon for its rows by status."""
    async with stack.daemon.client() as client:
        health = await client.health()
    backlog = {status: health.rows.get(status, 0) for status in ("pending", "inflight", "dead")}
    if not health.missing:
        return {"backlog": backlog}
    what = "the broker's database lost messages: see `postroom outbox resend --missing --dry-run`"
    return {"backlog": {**backlog, "missing at the broker": health.missing}, "problem": what}


async def _health(stack: Stack) -> dict[str, Any]:
    """Ask the broker how it is; it keeps no backlog."""
    async with stack.broker.client() as client:
        reasons = (await client.health()).reasons
    return {"problem": "; ".join(reasons)} if reasons else {}


async def _unpublished(stack: Stack) -> dict[str, Any]:
    """Ask the worker for what waits to be published."""
    return {"backlog": {f"unpublished {source}": count for source, count in (await stack.worker.backlog()).items()}}


async def _jobs(stack: Stack) -> dict[str, Any]:
    """Ask the broker for the jobs that an operator looks after."""
    from postroom._wire.jobs import JOBS  # noqa: PLC0415

    async with stack.broker.client() as client:
        counts = await client.counts(JOBS)
    return {
        "backlog": {
            "running jobs": counts.running,
            "failed jobs": counts.failed,
            "steps that no worker knows": counts.unknown,
        }
    }


async def _dead_letters(stack: Stack) -> dict[str, Any]:
    """Ask the broker how many dead letters each mesh has."""
    from postroom._wire.dead_letters import DEAD_LETTERS  # noqa: PLC0415

    async with stack.broker.client() as client:
        counts = await client.counts(DEAD_LETTERS)
    row = {"backlog": {f"dead in {stream}": count for stream, count in counts.letters.items()}}
    return row if counts.unread is None else {**row, "state": "failing", "problem": counts.unread.detail}
