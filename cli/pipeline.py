"""`postroom pipeline …`: run the pipelines over the history, in a Spark session of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.noun import Json, noun
from cli.output import fields, json_line, line, note, table
from postroom.chassis.exits import Exit

app = noun("Run the pipelines over the history, with Spark.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The pipeline; `postroom pipeline list` shows them.")]
Words = Annotated[
    list[str] | None, typer.Argument(metavar="[OPTION=VALUE]...", help="Its options, as mesh=sea since=2026-11-01.")
]


@app.command()
def run(*, name: Name, options: Words = None, as_json: Json = False) -> None:
    """Run one pipeline to its end and print a summary; exit code 1 if it found a violation."""
    from pipeline.runner import run_by_name  # noqa: PLC0415

    outcome = run_by_name(name, options or [], shown=not as_json)
    if as_json:
        json_line({"pipeline": name, "failed": outcome.failed, **outcome.facts})
    else:
        fields(outcome.facts.items())
        note(f"{name}: {'found what should not be' if outcome.failed else 'done'}")
    if outcome.failed:
        raise SystemExit(Exit.FAILED)


@app.command("list")
def list_(*, as_json: Json = False) -> None:
    """List the pipelines and their options."""
    from pipeline.registry import PIPELINES, described  # noqa: PLC0415
    from pipeline.runner import check_spark  # noqa: PLC0415

    check_spark()
    for pipeline in PIPELINES.values():
        options = described(pipeline.options)
        if as_json:
            entry = {"name": pipeline.name, "reads": pipeline.reads, "summary": pipeline.summary, "options": options}
            json_line(entry)
            continue
        line(f"{pipeline.name}: {pipeline.summary}")
        table(
            ("  OPTION", "MEANING"),
            ((f"  {key}{'' if option['required'] else '='}", option["description"]) for key, option in options.items()),
        )
