"""`postroom worker events …`: see events that JetStream refuses, and drop what can never be published."""

from __future__ import annotations

import asyncio
import getpass
from typing import Annotated, Final

import typer

from chassis.exits import Exit, Fatal
from cli.noun import Config, Json, Yes, noun
from cli.output import ago, confirm, line, listing, reason_or_ask
from cli.selection import chosen_ids

app = noun("See events that JetStream refuses, and drop those that can never be published.")

Context = Annotated[
    str | None, typer.Option("--context", "--mesh", help="Only of this mesh [default: all].", metavar="SLUG")
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Events; `-` reads ids from standard input.")]
Why = Annotated[
    str | None, typer.Option("--reason", help="Why; kept with the event. Asked for on a terminal.", metavar="TEXT")
]

_FAILING: Final = ("ID", "SUBJECT", "AGGREGATE", "TRIES", "AGE", "BEHIND", "ERROR")
_DROPPED: Final = ("AT", "BY", "ID", "SUBJECT", "ERROR", "WHY")


@app.command("list")
def list_(*, context: Context = None, config: Config = None, as_json: Json = False) -> None:
    """List events that JetStream refuses, oldest first, and how many wait behind each; never their payloads."""
    from worker.commands import ask_failing  # noqa: PLC0415
    from worker.config import load_config  # noqa: PLC0415

    listing(
        asyncio.run(ask_failing(load_config(config), context)),
        _FAILING,
        lambda one: (one.id, one.subject, one.aggregate, one.attempts, ago(one.occurred_at), one.behind, one.error),
        as_json=as_json,
    )


@app.command()
def drop(*, ids: Ids = None, reason: Why = None, config: Config = None, yes: Yes = False) -> None:
    """Take refused events out of the outbox for good, so that what waits behind them goes; they are kept in `log`."""
    from worker.commands import drop_events  # noqa: PLC0415
    from worker.config import load_config  # noqa: PLC0415

    settings, chosen = load_config(config), chosen_ids(ids)
    if not chosen:
        raise Fatal(Exit.USAGE, "name events by their ids (`postroom worker events list` shows them)")
    why = reason_or_ask(reason)
    confirm(f"Drop {len(chosen)} events, which will never be published?", yes=yes)
    asyncio.run(drop_events(settings, chosen, actor=getpass.getuser(), reason=why))
    for one in chosen:
        line(f"{one} dropped")


@app.command()
def log(*, config: Config = None, as_json: Json = False) -> None:
    """Show what operators dropped, and why."""
    from worker.commands import ask_dropped  # noqa: PLC0415
    from worker.config import load_config  # noqa: PLC0415

    listing(
        asyncio.run(ask_dropped(load_config(config))),
        _DROPPED,
        lambda one: (one.dropped_at, one.dropped_by, one.id, one.subject, one.error, one.reason),
        as_json=as_json,
    )
