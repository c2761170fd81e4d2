"""`postroom drill …`: what an operator hopes never to need, done on a stack of its own (docs/backup.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.noun import noun

app = noun("Rehearse a loss and the way back, on servers of its own.")


@app.callback()
def drill() -> None:
    """Rehearse a loss and the way back, on servers of its own."""


@app.command()
def restore(
    *,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="DIR", help="Keep everything in DIR, a new one [default: removed at the end]."),
    ] = None,
) -> None:
    """Put an older Postgres and an older outbox back, recover by the documented commands, and count."""
    from cli.demo import fresh_stack_directory  # noqa: PLC0415
    from cli.demo.programs import HandledStack, Receiver  # noqa: PLC0415
    from cli.demo.stage import Stage  # noqa: PLC0415
    from cli.drill.restore import RestoreDrill  # noqa: PLC0415
    from postroom.chassis.exits import Exit, Fatal  # noqa: PLC0415

    with fresh_stack_directory(state) as directory, Receiver() as receiver:
        stack = HandledStack(directory, receiver)
        try:
            holds = RestoreDrill(stack, Stage(), receiver).run()
        finally:
            stack.stop()
    if not holds:
        raise Fatal(Exit.FAILED, "a number is wrong: see the table")
