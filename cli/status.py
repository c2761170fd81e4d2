"""`postroom status`: every process that `up` started, where it is, and how far behind (spec operate.md, "CLI")."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

from cli.noun import Json, noun
from cli.output import listing
from cli.up import State, layout_of

if TYPE_CHECKING:
    from cli.stack import Stack
    from embedded import EmbeddedServer, ProcessIdentity

app = noun()

COLUMNS: Final = ("PROCESS", "STATE", "PID", "ADDRESS", "BACKLOG")
_ANSWER_SECONDS: Final = 2.0


@app.command()
def status(*, state: State = None, as_json: Json = False) -> None:
    """Show every process of `postroom up`, its pid, its address and its backlog; exit code 69 unless all run."""
    from chassis.exits import Exit  # noqa: PLC0415
    from cli.stack import Stack  # noqa: PLC0415
    from cli.stack.supervisor import supervisor_of  # noqa: PLC0415

    layout = layout_of(state)
    layout.check()
    stack = Stack(layout.state)
    rows = [_row("up", supervisor_of(layout), str(layout.state))]
    rows += [_program(stack, program) for program in stack.programs]
    listing(rows, COLUMNS, _cells, as_json=as_json)
    if any(row["state"] != "running" for row in rows):
        raise SystemExit(Exit.UNAVAILABLE)


def _row(name: str, process: ProcessIdentity | None, address: str) -> dict[str, Any]:
    if process is None:
        return {"process": name, "state": "stopped"}
    return {"process": name, "state": "running", "pid": process.pid, "address": address}


def _program(stack: Stack, program: EmbeddedServer) -> dict[str, Any]:
    row = _row(program.name, program.process, program.address)
    if program is stack.daemon and row["state"] == "running":
        backlog = asyncio.run(_backlog(stack))
        row |= {"state": "silent"} if backlog is None else {"backlog": backlog}
    return row


async def _backlog(stack: Stack) -> dict[str, int] | None:
    """Ask the daemon for its rows by status; None where it does not answer."""
    from postroom import PostroomError  # noqa: PLC0415

    try:
        async with stack.daemon.client() as client:
            rows = (await asyncio.wait_for(client.health(), _ANSWER_SECONDS)).rows
    except (PostroomError, TimeoutError):
        return None
    return {status: rows.get(status, 0) for status in ("pending", "inflight", "dead")}


def _cells(row: dict[str, Any]) -> list[Any]:
    backlog = ", ".join(f"{count} {status}" for status, count in row.get("backlog", {}).items())
    return [row["process"], row["state"], row.get("pid"), row.get("address"), backlog or None]
