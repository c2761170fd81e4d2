"""`postroom worker …`: run the worker that publishes, see its backlog, publish again by hand."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from cli.failing import Context, failing
from cli.noun import Config, DryRun, Json, Since, Yes, noun
from cli.output import ago, confirm, json_line, line, table

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
