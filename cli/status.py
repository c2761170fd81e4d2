"""`postroom status`: how an installation is, what is wrong first (docs/contract/operate.md#operate-61)."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.installation import Place
from cli.noun import Json, Socket, TokenFile, Url, noun
from cli.screen import show_status
from cli.up import State

app = noun()


@app.command()
def status(
    *,
    state: State = None,
    socket: Socket = None,
    url: Url = None,
    token_file: TokenFile = None,
    hour: Annotated[
        bool, typer.Option("--hour", help="Instead: what happened in each minute of the last hour.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show how daemons, brokers, workers and consumers are, what is wrong first, with the command that helps.

    It asks the daemon of this machine, the broker, and what `postroom up` started, as far as there are any.

    Exit code 69: something does not run or cannot be asked; 1: something else is wrong, or waits for an operator, as
    dead rows and dead letters do; 0: all is well.
    """
    show_status(Place(state, socket, url, token_file), as_json=as_json, hour=hour)
