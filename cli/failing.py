"""`postroom worker events …` and `… deliveries …`: see what fails to be published, and drop what never can be."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from cli.connect import with_broker
from cli.noun import Json, TokenFile, Url, Yes, noun
from cli.output import ago, confirm, line, listing, reason_or_ask
from cli.selection import chosen_ids
from postroom._wire import unpublished
from postroom._wire.administration import MeshQuery
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
    things = unpublished.UNPUBLISHED[source]
    app = noun(f"See {source} that JetStream refuses, and drop those that can never be published.")

    @app.command("list")
    def list_(*, context: Context = None, url: Url = None, token_file: TokenFile = None, as_json: Json = False) -> None:
        """List what fails, oldest first, and how many wait behind each; never their payloads."""
        found = with_broker(url, token_file, lambda client: client.list_things(things, MeshQuery(mesh=context)))
        listing(
            found.failing,
            _FAILING,
            lambda one: (one.id, one.subject, one.aggregate, one.attempts, ago(one.occurred_at), one.behind, one.error),
            as_json=as_json,
        )

    @app.command(help=f"{things.verbs['drop'].effect[:-1]}; `log` shows who did it, and why.")
    def drop(
        *, ids: Ids = None, reason: Why = None, url: Url = None, token_file: TokenFile = None, yes: Yes = False
    ) -> None:
        chosen = chosen_ids(ids)
        if not chosen:
            raise Fatal(Exit.USAGE, f"name {source} by their ids (`postroom worker {source} list` shows them)")
        why, meant = reason_or_ask(reason), unpublished.Ids(ids=chosen)
        confirm(f"Drop {len(chosen)} {source}, which will never be published?", yes=yes)
        result = with_broker(url, token_file, lambda client: client.change(things, "drop", meant, reason=why))
        for one in result.done:
            line(f"{one} dropped")

    @app.command()
    def log(*, url: Url = None, token_file: TokenFile = None, as_json: Json = False) -> None:
        """Show what operators dropped, and why."""
        listing(
            with_broker(url, token_file, lambda client: client.log(things)).dropped,
            _DROPPED,
            lambda one: (one.dropped_at, one.dropped_by, one.id, one.subject, one.error, one.reason),
            as_json=as_json,
        )

    return app
