"""`postroom up`: start everything on this machine, and keep it running (docs/contract/operate.md#operate-9)."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.noun import noun
from cli.output import line, note

if TYPE_CHECKING:
    from cli.stack import Layout
    from embedded import EmbeddedServer

app = noun()

State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        envvar="POSTROOM_STATE",
        help="Keep everything below DIR [default: in the XDG state directory].",
        show_default=False,
    ),
]


@app.command()
def up(
    *,
    state: State = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when everything is ready.")] = False,
) -> None:
    """Start Postgres, Redis, NATS, a broker, a worker and a daemon on this machine; Ctrl-C stops them.

    Programs that are killed are started again, and all data is kept. `postroom down` stops a detached one.
    """
    from cli.stack.supervisor import detached, supervisor_of  # noqa: PLC0415

    layout = layout_of(state)
    supervisor = supervisor_of(layout)
    if supervisor is not None:
        note(f"Postroom runs already (pid {supervisor.pid}).")
    elif detach:
        detached(layout)
    else:
        _run(layout)
        return
    explain(layout)


def layout_of(state: Path | None) -> Layout:
    """Return the files of the stack in `state`, or in the default place."""
    from cli.stack import Layout, default_state_directory  # noqa: PLC0415

    return Layout((state or default_state_directory()).absolute())


def _run(layout: Layout) -> None:
    """Start everything, say how to use it, and supervise it until Ctrl-C or SIGTERM."""
    from cli.stack import Stack, fatal_failures  # noqa: PLC0415
    from cli.stack.supervisor import Interrupted, interruptible, keep_running, supervising  # noqa: PLC0415
    from postroom.chassis.runtime import notify  # noqa: PLC0415

    stack = Stack(layout.state)
    with interruptible(), supervising(layout), fatal_failures():
        try:
            stack.stop()  # what a supervisor that was killed has left would end under this one
            stack.start(_say_ready)
            explain(layout)
            notify("READY=1")
            keep_running(stack, note)
        except Interrupted:
            note("stopping")
        finally:
            stack.stop()


def _say_ready(program: EmbeddedServer) -> None:
    process = program.process
    line(f"  {program.name:<9} ready, pid {process.pid if process else '-'}")
    sys.stdout.flush()


def explain(layout: Layout) -> None:
    """Say how to use what runs now."""
    line(
        f"""
Postroom is up; it keeps everything in {layout.state}

  set -a; . {shlex.quote(str(layout.env_file))}; set +a      set up this shell
  postroom send topic:orders 'hello' --wait
  postroom outbox list
  postroom inbox list
  postroom status
  postroom down
"""
    )
    sys.stdout.flush()
