"""`postroom down`: stop only what `up` started in one state directory (docs/contract/operate.md#operate-10)."""

from __future__ import annotations

import signal
from typing import Annotated, Final

import typer

from cli.noun import Yes, noun
from cli.output import confirm, line
from cli.up import State, layout_of

app = noun()

_STOP_SECONDS: Final = 120.0  # the daemon may finish its batch, Postgres its checkpoint


@app.command()
def down(
    *,
    state: State = None,
    wipe: Annotated[
        bool, typer.Option("--wipe", help="Remove the state directory too, with every message in it.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Stop what `postroom up` started in this state directory, and nothing else."""
    from cli.stack import Stack, fatal_failures  # noqa: PLC0415
    from cli.stack.supervisor import supervisor_of  # noqa: PLC0415

    layout = layout_of(state)
    layout.check()
    if wipe:
        confirm(f"Remove {layout.state} and every message in it?", yes=yes)
    supervisor = supervisor_of(layout)
    if supervisor is not None:
        supervisor.end((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, _STOP_SECONDS))
    with fatal_failures():
        Stack(layout.state).stop()  # what outlived a supervisor that was killed
    line("stopped" if supervisor is not None else "nothing was running")
    if wipe:
        layout.wipe()
        line(f"removed {layout.state}")
