"""`postroom trace ID`: the story of one message, and where it waits now (docs/contract/operate.md#operate-51)."""

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import typer

from cli import completion
from cli.connect import NOT_ASKED, PATIENCE, RESTARTING, TIMEOUT
from cli.noun import BrokerPlace, Json, Socket, noun
from cli.output import draw, fold_command, folded, json_line, line_width, note, styled
from postroom import AsyncClient, BrokerClient, Unavailable
from postroom._wire.trace import Step, Story, follow_trace
from postroom._wire.transport import find_socket
from postroom.chassis.exits import Exit, Fatal

app = noun()

_NAMED: Final = {
    "client_message_id": "as {}",
    "sender": "from {}",
    "to": "to {}",
    "state": "is {}",
    "broker": "at {}",
    "seconds": "in {} s",
    "since": "since {}",
    "causation_id": "caused by {}",
}
_LOOK_SECONDS: Final = 1.0  # between two looks with --follow


@app.command()
def trace(
    *,
    id_: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="A client_message_id, or the id of a broker's message, a row, an event, a dead letter or a job.",
            autocompletion=completion.anything,
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on while it is on its way, and show what is new.")
    ] = False,
    broker: BrokerPlace,
    socket: Socket = None,
    as_json: Json = False,
) -> None:
    """Tell the story of a message: what became of it, where it waits now, and the command that helps.

    \b
        postroom trace order-2026-001
        postroom trace 019a8f3e-6c5f-7d3a-9a43-2f5b1c0d9e77 --follow
    """  # noqa: D301 - \b: as it stands
    if not id_:
        raise Fatal(Exit.USAGE, "the id is empty: name a message, a row, an event, a dead letter or a job by its id")
    with suppress(Unavailable):  # no daemon runs here
        socket = find_socket(socket)  # once: a daemon that is restarted has no socket meanwhile
    shown: dict[str, Step] = {}
    before: Story | None = None
    while True:
        story = _ask(id_, broker, socket, PATIENCE if before is None else RESTARTING)
        if story != before:
            if as_json:
                json_line(story)
            else:
                fresh = [step.id for step in story.steps if shown.get(step.id) != step]
                show_story(story, fresh, broker_asked=broker.url is not None)
            sys.stdout.flush()
        if before is None:
            for problem in story.unread:
                note(problem.detail)
            if broker.url is None:
                note(NOT_ASKED)
        before, shown = story, {step.id: step for step in story.steps}
        waiting = [shown[wait.step] for wait in story.waits if wait.step in shown]
        if not follow or all(step.outcome == "dead" for step in waiting):
            return
        time.sleep(_LOOK_SECONDS)


def _ask(id_: str, place: BrokerPlace, socket: Path | None, patience: float) -> Story:
    """Ask the broker, where one is configured, and the daemon of this machine, where there is one.

    Each has its `patience`, in seconds: without one of them a story ends too early.
    """

    async def work(broker: BrokerClient | None = None) -> Story:
        ask = None if broker is None else lambda one, _sender: broker.trace(one)
        try:
            client = AsyncClient(socket, patience=patience, timeout=TIMEOUT)
        except Unavailable:  # no daemon runs here
            if ask is None:
                raise
            return await follow_trace(id_, broker=ask, daemon=None)
        async with client:
            return await follow_trace(id_, broker=ask, daemon=client.trace)

    return asyncio.run(work()) if place.url is None else place.ask(work, patience=patience)


def show_story(story: Story, fresh: list[str], *, broker_asked: bool = True) -> None:
    """Write where the story stops, then its tree; of what was shown before, only what is `fresh`."""
    width = line_width()
    outcomes, lines = {step.id: step.outcome for step in story.steps}, list[str]()
    for wait in story.waits:
        lines += folded(f"waits: {wait.why}", width, "", "       ", outcomes.get(wait.step))
        if wait.help is not None:
            lines += [styled(line, "head") for line in fold_command(wait.help, width, "       ")]
    if not story.waits:
        limit = ", as far as could be asked" if story.unread or not broker_asked else ""
        lines += folded(f"nothing waits{limit}", width)
    for lead, step, _ in draw(story.steps):
        if step.id not in fresh:
            continue
        below = lead.replace("├─ ", "│  ").replace("└─ ", "   ")
        style, outcome = (None, "") if step.outcome == "done" else (step.outcome, f"  {step.outcome}")
        lines += folded(f"{step.what} {step.thing}{outcome}", width, lead, below + "  ", style)
        lines += folded("  ".join(_said(step)), width, below + "  ", below + "  ")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    if story.more:
        note("there is more than is shown: `postroom trace` of one of these ids shows what follows from it")


def _said(step: Step) -> Iterator[str]:
    if step.at is not None:
        yield f"{step.at:%Y-%m-%d %H:%M:%S}.{step.at.microsecond // 1000:03d}Z"
    if step.place is not None:
        yield step.place
    if step.attempt is not None and step.attempt != 1:
        yield f"{step.attempt} attempts"
    if step.by is not None:
        yield f"by {step.by}"
    yield from (words.format(step.ids[name]) for name, words in _NAMED.items() if step.ids.get(name))
    if step.reason is not None:
        yield step.reason
