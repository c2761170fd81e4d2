"""The command line as Typer sees it: the options of `postroom` itself, and every verb under it."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from cli.ending import INTERRUPTED
from cli.verbs import LazyGroup

EXIT_CODES = (
    "Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 conflict, 69 unavailable, 74 input or output failed, "
    "75 try again, 77 not permitted, 78 config, 130 interrupted, 141 the reader of the output closed it."
)

app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


def show_version(wanted: bool) -> None:  # noqa: FBT001 - Typer's shape of an option's callback
    """Print the version and end."""
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 - slow to import, and rarely wanted

        typer.echo(f"postroom {version('postroom-server')}")
        raise typer.Exit


@app.callback()
def postroom(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show the version.")
    ] = False,
) -> None:
    """Postroom, the mail room of a machine."""
    del version  # its callback has answered
    if debug:
        os.environ["POSTROOM_DEBUG"] = "1"


def call(arguments: list[str]) -> int:
    """Run one command and return the exit code that it chose; raises whatever else ended it."""
    code = typer.main.get_command(app).main(arguments, "postroom", standalone_mode=False)
    if code == INTERRUPTED:  # Typer has turned Ctrl-C into a code
        raise KeyboardInterrupt
    sys.stdout.flush()
    return code if isinstance(code, int) else 0
