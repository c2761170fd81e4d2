"""Which rows a verb means: ids on the command line, ids from standard input (`-`), or all that a filter matches."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cli.output import note
from cli.quantities import age
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom import RowFilter

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="Rows by row id or client_message_id; `-` reads them from standard input."),
]
All = Annotated[bool, typer.Option("--all", help="Every row that the filters match.")]
Status = Annotated[
    str | None, typer.Option(metavar="STATUS", help="Only rows that are pending, inflight, done, dead or aborted.")
]
Destination = Annotated[str | None, typer.Option(metavar="TO", help="Only rows to this destination.")]
Code = Annotated[str | None, typer.Option(metavar="CODE", help="Only rows whose last error has this code.")]
OlderThan = Annotated[
    float | None,
    typer.Option(parser=age, metavar="DURATION", help="Only rows older than 90s, 15m, 7d, or than a time."),
]
Held = Annotated[bool | None, typer.Option("--held/--not-held", help="Only rows that are held, or that are not.")]

STATUSES: Final = ("pending", "inflight", "done", "dead", "aborted")
MAX_ID: Final = 128  # characters
MAX_LINE: Final = 64 * 1024  # bytes of one line of standard input


def row_filter(
    *,
    status: str | None = None,
    destination: str | None = None,
    code: str | None = None,
    older_than: float | None = None,
    held: bool | None = None,
) -> RowFilter:
    """Build the filter that the options describe."""
    import msgspec  # noqa: PLC0415

    from postroom import RowFilter  # noqa: PLC0415
    from postroom._wire.message import parse_destination  # noqa: PLC0415

    if destination is not None:
        parse_destination(destination)  # a misspelt one would match nothing, and say nothing
    if status is not None and status not in STATUSES:
        raise typer.BadParameter(f"{status!r} is not a status: {', '.join(STATUSES)}", param_hint="--status")
    members = {"status": status, "destination": destination, "code": code, "older_than_seconds": older_than}
    return msgspec.convert({**members, "held": held}, RowFilter)


def chosen_ids(arguments: Sequence[str] | None) -> list[str]:
    """Return the ids of the command line, `-` replaced by those of standard input, each once, in order.

    Where `-` brings none there is nothing to do, which is no mistake: the command ends, with exit code 0.
    """
    ids: dict[str, None] = {}
    for argument in arguments or ():
        ids.update(dict.fromkeys(ids_from_input() if argument == "-" else [argument]))
    if "" in ids:
        raise Fatal(Exit.USAGE, "an id is empty")
    if arguments and not ids:
        note("there are no ids on standard input: nothing to do")
        raise typer.Exit
    return list(ids)


def ids_from_input() -> Iterator[str]:
    """Yield the ids on standard input: one a line, or the `id` of a line of JSON, as `outbox list --json` writes."""
    import msgspec  # noqa: PLC0415

    for number, text in enumerate(iter(lambda: sys.stdin.buffer.readline(MAX_LINE), b""), 1):
        words = text.strip()
        try:
            row_id = msgspec.json.decode(words)["id"] if words.startswith(b"{") else words.decode("ascii")
        except (msgspec.DecodeError, KeyError, UnicodeDecodeError) as error:
            raise Fatal(Exit.USAGE, f"line {number} of standard input has no id") from error
        if not isinstance(row_id, str) or len(row_id) > MAX_ID:
            raise Fatal(Exit.USAGE, f"line {number} of standard input has no id")
        if row_id:
            yield row_id
