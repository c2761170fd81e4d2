"""`postroom send`: hand in one message, or a file or pipe of them (docs/contract/operate.md#operate-7)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer

from cli import completion
from cli.files import file_errors, open_source, read_plain_file
from cli.lines import (
    Common,
    json_lines,
    meta_of,
    moment_of,
    plain_lines,
    send_lines,
)
from cli.message import PRIORITIES, send_one
from cli.noun import Json, Socket, duration, named, noun
from postroom.chassis.exits import Exit, Fatal

app = noun()

_WAIT_SECONDS: Final = 60.0


@app.command()
def send(
    *,
    to: Annotated[
        str | None,
        typer.Argument(
            metavar="TO",
            help="topic:NAME, dm:MEMBER or queue:NAME (not with --ndjson).",
            autocompletion=completion.destinations,
        ),
    ] = None,
    body: Annotated[
        str | None, typer.Argument(metavar="[BODY|-]", help="The text; `-`: a message per line of standard input.")
    ] = None,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="A message per line of a file.")] = None,
    ndjson: Annotated[
        bool, typer.Option("--ndjson", help='The lines are whole messages: {"to": …, "body": …, …}.')
    ] = False,
    body_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One message: the content of the file.")
    ] = None,
    client_message_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The message's id; sending it again changes nothing.")
    ] = None,
    id_prefix: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Line 7 gets the id TEXT-000000007, so that a run can be repeated."),
    ] = None,
    meta: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Meta data; may be repeated.")] = None,
    priority: Annotated[str, typer.Option(help="now, next or low.")] = "next",
    reply_to: Annotated[str | None, typer.Option(metavar="ID", help="The message that this one answers.")] = None,
    mention: Annotated[
        list[str] | None, typer.Option(metavar="MEMBER", help="May be repeated.", callback=named("member"))
    ] = None,
    not_before: Annotated[str | None, typer.Option(metavar="TIME", help="Not before 2026-11-21T09:00:00Z.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the broker has accepted the message.")] = False,
    timeout: Annotated[
        float | None, typer.Option(parser=duration, metavar="DURATION", help="How long to --wait [default: 60s].")
    ] = None,
    errors: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write failed lines there as JSON [default: standard error].")
    ] = None,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Send a message; when this ends with exit code 0 the message is on disk, and will be sent."""
    if priority not in PRIORITIES:
        raise typer.BadParameter(f"{priority!r} is not a priority: use now, next or low", param_hint="--priority")
    if timeout is not None and not wait:
        raise Fatal(Exit.USAGE, "--timeout says how long to --wait: give both")
    common = Common(meta_of(meta), priority, reply_to, mention, moment_of(not_before))  # type: ignore[arg-type]
    if ndjson and file is None:
        file = Path("-")
    if sum(given is not None for given in (body, file, body_file)) != 1:
        raise Fatal(Exit.USAGE, "give one of BODY, `-` (a message per line of standard input), --file and --body-file")
    source = Path("-") if body == "-" else file
    if source is None:
        _refuse_options(id_prefix=id_prefix, errors=errors)
        patience = (_WAIT_SECONDS if timeout is None else timeout) if wait else None
        content = read_plain_file(body_file) if body_file is not None else (body or "").encode(errors="surrogateescape")
        send_one(socket, _destination(to), content, common._asdict(), client_message_id, wait=patience, as_json=as_json)
        return
    _refuse_options(id=client_message_id, wait=wait or None)
    parse = json_lines(id_prefix) if ndjson else plain_lines(_destination(to), common, id_prefix)
    if ndjson and (to is not None or common != Common()):
        raise Fatal(Exit.USAGE, "with --ndjson each line is a whole message: omit TO and the message's options")
    with open_source(source) as stream, ExitStack() as opened:
        refused = None
        if errors is not None:
            with file_errors("write", errors):
                refused = opened.enter_context(errors.open("w", encoding="utf-8"))
        send_lines(socket, stream, parse, refused, as_json=as_json)


def _destination(to: str | None) -> str:
    from postroom._wire.message import parse_destination  # noqa: PLC0415

    if to is None:
        raise Fatal(Exit.USAGE, "give a destination: topic:NAME, dm:MEMBER or queue:NAME")
    return str(parse_destination(to))


def _refuse_options(**options: object) -> None:
    """Refuse options that would be overlooked, since they are for a single message, or for lines, only."""
    if given := [f"--{name.replace('_', '-')}" for name, value in options.items() if value is not None]:
        raise Fatal(
            Exit.USAGE,
            f"{given[0]} cannot be used here: omit it, since it is only for one message, or for many lines",
        )
