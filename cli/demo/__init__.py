"""`postroom demo`: a whole run on real parts, with all that may go wrong (docs/contract/operate.md#operate-6).

It works in a temporary directory of its own unless another is named. However it ends, nothing keeps running: every
process ends with this one, and the files of a run that was killed are removed by the next.
"""

import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Final

import typer

from cli.demo.acts import EVENTS, Demo
from cli.demo.stage import HandledStack, Receiver, Stage
from cli.noun import noun
from cli.stack import fatal_failures
from cli.stack.layout import Layout
from cli.stack.supervisor import interruptible, supervising
from embedded import ProcessIdentity
from postroom.chassis.exits import Exit, Fatal

app = noun()

State = Annotated[
    Path | None,
    typer.Option("--state", metavar="DIR", help="Keep everything in DIR, a new one [default: removed at the end]."),
]

_PREFIX: Final = "postroom-demo-"


@app.command()
def demo(*, state: State = None) -> None:
    """Send a file of events through broker stops and a killed daemon to a handler, and count that nothing is lost."""
    if not EVENTS.exists():
        sentence = (
            f"there is no {EVENTS}: the demo runs in the source tree, by `make demo`; `postroom up` runs anywhere"
        )
        raise Fatal(Exit.UNAVAILABLE, sentence)
    perform(state, lambda *given: Demo(*given).run())


def perform(state: Path | None, run: Callable[[HandledStack, Stage, Receiver], bool]) -> None:
    """Run something on a new stack in `state`, or in a directory that is removed afterwards, and stop the stack.

    Raises `Fatal` where `run` says that a number is wrong, and where there is an outbox already.
    """
    if state is None:
        sweep()
    place = tempfile.TemporaryDirectory(prefix=_PREFIX) if state is None else nullcontext(state)
    with interruptible(), fatal_failures(), place as named:
        directory = Path(named).absolute()
        layout = Layout(directory)
        if layout.outbox_file.exists():
            raise Fatal(Exit.CONFLICT, f"{directory} already has an outbox: choose a new directory")
        with supervising(layout), Receiver() as receiver:
            stack = HandledStack(directory, receiver)
            try:
                holds = run(stack, Stage(), receiver)
            finally:
                stack.stop()
    if not holds:
        raise Fatal(Exit.FAILED, "a number is wrong: see the table")


def sweep() -> None:
    """Remove the files of runs that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = ProcessIdentity.read(Layout(directory).pid_file)
        if owner is not None and not owner.alive:
            shutil.rmtree(directory, ignore_errors=True)
