"""`postroom up` and `down`: start everything on this machine and keep it running; stop it again.

The rules are docs/contract/operate.md#operate-9 and docs/contract/operate.md#operate-10.
"""

import shlex
import signal
from pathlib import Path
from typing import Annotated, Final

import typer

from cli.noun import Yes, noun
from cli.output import Progress, confirm, line, note
from cli.stack import Stack, fatal_failures
from cli.stack import supervisor as supervision
from cli.stack.layout import Layout

app = noun()
downs = noun()

State = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="DIR",
        envvar="POSTROOM_STATE",
        help="Where everything is kept [default: in the XDG state directory].",
        show_default=False,
    ),
]

_STOP_SECONDS: Final = 120.0  # the daemon may finish its batch, Postgres its checkpoint


@app.command()
def up(
    *,
    state: State = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when everything is ready.")] = False,
) -> None:
    """Start Postgres, Redis, NATS, a broker, a worker and a daemon on this machine; Ctrl-C stops them.

    Programs that are killed are started again, and all data is kept. `postroom down` stops a detached one.
    """
    from postroom.chassis.runtime import notify  # noqa: PLC0415

    layout = Layout.of(state)
    supervisor = supervision.supervisor_of(layout)
    if supervisor is not None or detach:
        if supervisor is not None:
            note(f"Postroom runs already (pid {supervisor.pid}).")
            supervision.await_ready(layout, supervisor, note)
        else:
            supervision.detached(layout, lambda said: Progress.say(f"  {said}"))
        explain(layout)
        return
    stack = Stack(layout.state)

    def begin(said: str) -> None:
        notify(f"STATUS={said}")  # shown by the `postroom up --detach` that started this
        Progress.say(f"  {said}")

    with supervision.interruptible(), supervision.supervising(layout), fatal_failures():
        try:
            stack.stop()  # programs left by a supervisor that was killed end at any moment
            stack.start(lambda said: line(f"  {said}", flush=True), begin)
            explain(layout)
            notify("READY=1")
            supervision.keep_running(stack, note)
        except supervision.Interrupted:
            note("stopping")
        finally:
            stack.stop()


@downs.command()
def down(
    *,
    state: State = None,
    wipe: Annotated[
        bool,
        typer.Option(
            "--wipe", help="Remove the state directory too, with every message in it, but not what links in it lead to."
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """Stop what `postroom up` started in this state directory, and nothing else."""
    layout = Layout.of(state)
    layout.check()
    if wipe:
        confirm(f"Remove {layout.state} and every message in it?", yes=yes)
    supervisor = supervision.supervisor_of(layout)
    if supervisor is not None:
        supervisor.end((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, _STOP_SECONDS))
    with fatal_failures():
        Stack(layout.state).stop()  # what outlived a supervisor that was killed
    line("stopped" if supervisor is not None else "nothing was running")
    if wipe:
        left = layout.wipe()
        line(f"removed {layout.state}")
        if left:
            note(f"what links in it led to is not removed: {', '.join(map(str, left))}")


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
""",
        flush=True,
    )
