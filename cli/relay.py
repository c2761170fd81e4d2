"""`postroom relay …`: pause and resume the way to the broker, so that a recovered receiver isn't flooded."""

from __future__ import annotations

from typing import Annotated

import typer

from cli import completion
from cli.connect import with_daemon
from cli.noun import Json, Reason, Socket, noun, rate
from cli.output import json_line, line, reason_or_ask

app = noun("Pause and resume the relay to the broker.")

To = Annotated[
    str | None,
    typer.Argument(
        metavar="[TO]", help="Only this destination [default: all].", autocompletion=completion.destinations
    ),
]


@app.command()
def pause(*, to: To = None, reason: Reason = None, as_json: Json = False, socket: Socket = None) -> None:
    """Pause the relay until it is resumed, across restarts too; sends are still accepted and kept."""
    why = reason_or_ask(reason)
    status = with_daemon(socket, lambda client: client.pause_relay(to, reason=why))
    json_line(status) if as_json else line(f"paused {_what(to)}, until `postroom relay resume`; sends are kept")


@app.command()
def resume(
    *,
    to: To = None,
    per_second: Annotated[
        float | None, typer.Option("--rate", parser=rate, metavar="RATE", help="At most 50/s [default: no limit].")
    ] = None,
    reason: Reason = None,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Resume the relay."""
    why = reason_or_ask(reason)
    status = with_daemon(socket, lambda client: client.resume_relay(to, reason=why, rate_per_second=per_second))
    limit = f", at most {per_second:g}/s" if per_second is not None else ""
    json_line(status) if as_json else line(f"resumed {_what(to)}{limit}")


def _what(to: str | None) -> str:
    return f"relaying to {to}" if to is not None else "relaying"
