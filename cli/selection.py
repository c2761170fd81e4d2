"""Which things a verb means: ids on the command line, ids from standard input (`-`), or all that a filter matches."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec
import typer

from cli.output import note
from postroom.chassis.exits import Exit, Fatal

All = Annotated[bool, typer.Option("--all", help="Everything that the filters match.")]
MAX_ID: Final = 128  # characters
MAX_LINE: Final = 64 * 1024  # bytes of one line of standard input


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
