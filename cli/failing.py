"""`postroom worker events …` and `… deliveries …`: see what fails to be published, and drop what never can be."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import typer

from cli.noun import Config, Json, Yes, noun
from cli.output import ago, confirm, line, listing, reason_or_ask
from cli.selection import chosen_ids
from postroom.chassis.exits import Exit, Fatal

Context = Annotated[
    str | None, typer.Option("--context", "--mesh", help="Only of this mesh [default: all].", metavar="SLUG")
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Which; `-` reads ids from standard input.")]
Why = Annotated[
    str | None, typer.Option("--reason", help="Why; kept in `log`. Asked for on a terminal.", metavar="TEXT")
]

_FAILING: Final = ("ID", "SUBJECT", "AGGREGATE", "TRIES", "AGE", "BEHIND", "ERROR")
_DROPPED: Final = ("AT", "BY", "ID", "SUBJECT", "ERROR", "WHY")


def failing(source: str) -> typer.Typer:
    """Return the verbs for the `events`, or the `deliveries`, that JetStream does not take."""
    app = noun(f"See {source} that JetStream refuses, and drop those that can never be published.")

    @app.command("list")
    def list_(*, context: Context = None, config: Config = None, as_json: Json = False) -> None:
        """List what fails, oldest first, and how many wait behind each; never their payloads."""
        from postroom.worker.commands import ask_failing  # noqa: PLC0415
        from postroom.worker.config import load_config  # noqa: PLC0415

        listing(
            asyncio.run(ask_failing(load_config(config), source, context)),
            _FAILING,
            lambda one: (one.id, one.subject, one.aggregate, one.attempts, ago(one.occurred_at), one.behind, one.error),
            as_json=as_json,
        )

    @app.command()
    def drop(*, ids: Ids = None, reason: Why = None, config: Config = None, yes: Yes = False) -> None:
        """Permanently drop what fails, so that what waits behind it is published; `log` shows who did it, and why."""
        from postroom.worker.commands import drop_chosen  # noqa: PLC0415
        from postroom.worker.config import load_config  # noqa: PLC0415

        settings, chosen = load_config(config), chosen_ids(ids)
        if not chosen:
            raise Fatal(Exit.USAGE, f"name {source} by their ids (`postroom worker {source} list` shows them)")
        why = reason_or_ask(reason)
        confirm(f"Drop {len(chosen)} {source}, which will never be published?", yes=yes)
        asyncio.run(drop_chosen(settings, source, chosen, reason=why))
        for one in chosen:
            line(f"{one} dropped")

    @app.command()
    def log(*, config: Config = None, as_json: Json = False) -> None:
        """Show what operators dropped, and why."""
        from postroom.worker.commands import ask_dropped  # noqa: PLC0415
        from postroom.worker.config import load_config  # noqa: PLC0415

        listing(
            asyncio.run(ask_dropped(load_config(config), source)),
            _DROPPED,
            lambda one: (one.dropped_at, one.dropped_by, one.id, one.subject, one.error, one.reason),
            as_json=as_json,
        )

    return app
