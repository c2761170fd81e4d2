"""`postroom worker …`: run the worker that publishes, see its backlog, publish again by hand."""

from __future__ import annotations

import asyncio
from typing import Annotated, Final

import typer

from cli.connect import with_broker
from cli.noun import Config, DryRun, Json, Since, TokenFile, Url, Yes, noun
from cli.output import ago, confirm, json_line, line, listing, reason_or_ask, table
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


app = noun("Run the worker that publishes; see its backlog, publish again.")
for _source in ("events", "deliveries"):
    app.add_typer(failing(_source), name=_source)

Stream = Annotated[str | None, typer.Option("--stream", help="Only what was published to this stream.", metavar="NAME")]
Flows = Annotated[
    list[str] | None,
    typer.Option("--flow", metavar="MODULE:FLOW", help="Also run this flow, as nightly_export:flow. Repeatable."),
]
Confirmed = Annotated[
    bool, typer.Option("--confirmed", help="Also what is known to be handled; those who handled it skip it.")
]


@app.command()
def run(*, config: Config = None, flow: Flows = None) -> None:
    """Publish, and run the jobs of flows, until a signal says stop.

    Any number of workers may run, beside the one of `postroom up` too: they share the work.
    """
    from cli.worker_process import become_worker, options  # noqa: PLC0415

    become_worker("run", *options(config=config, flow=flow))


@app.command()
def backlog(*, context: Context = None, config: Config = None, as_json: Json = False) -> None:
    """Show what waits to be published, and since when."""
    from postroom.worker.commands import ask_backlogs  # noqa: PLC0415
    from postroom.worker.config import load_config  # noqa: PLC0415

    found = asyncio.run(ask_backlogs(load_config(config), context))
    if as_json:
        for source, one in found.items():
            json_line({"source": source, "count": one.count, "oldest_at": one.oldest_at, "failing": one.failing})
    else:
        rows = [(source, one.count, ago(one.oldest_at), one.failing) for source, one in found.items()]
        table(("source", "waiting", "oldest", "failed before"), rows)


@app.command()
def redrive(
    *,
    since: Since,
    stream: Stream = None,
    confirmed: Confirmed = False,
    config: Config = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Publish again what was published since a time and is not known to be handled; inboxes skip what they have."""
    from postroom.worker.commands import redrive_since  # noqa: PLC0415
    from postroom.worker.config import load_config  # noqa: PLC0415

    settings = load_config(config)
    if not dry_run:
        confirm(f"Publish again what was published since {since:%Y-%m-%d %H:%M:%S}Z?", yes=yes)
    found = asyncio.run(redrive_since(settings, since, stream=stream, confirmed=confirmed, dry_run=dry_run))
    for one in found:
        if as_json:
            json_line(one)
        else:
            line(f"{one.source}: {one.messages} {'would be' if dry_run else 'are'} published again")
