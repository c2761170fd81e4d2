"""`postroom relay …`: pause and resume the way to the broker, so that a recovered receiver isn't flooded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.connect import with_daemon
from cli.noun import Json, Reason, Socket, noun
from cli.output import fields, json_line, reason_or_ask
from cli.quantities import rate

if TYPE_CHECKING:
    from postroom.sends import RelayStatus

app = noun("Pause and resume the way to the broker.")

To = Annotated[str | None, typer.Argument(metavar="[TO]", help="Only this destination [default: all].")]


@app.command()
def pause(*, to: To = None, reason: Reason = None, as_json: Json = False, socket: Socket = None) -> None:
    """Stop relaying until it is resumed, over restarts too; sends are still accepted and kept."""
    why = reason_or_ask(reason)
    show(with_daemon(socket, lambda client: client.pause_relay(to, reason=why)), as_json=as_json)


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
    """Relay again."""
    why = reason_or_ask(reason)
    status = with_daemon(socket, lambda client: client.resume_relay(to, reason=why, rate_per_second=per_second))
    show(status, as_json=as_json)


def show(status: RelayStatus, *, as_json: bool) -> None:
    """Print what the relay does now."""
    if as_json:
        json_line(status)
        return
    fields(
        (
            ("relay", status.state),
            ("because", status.reason),
            ("paused for", ", ".join(status.paused_destinations) or None),
            ("rate", None if status.rate_per_second is None else f"{status.rate_per_second:g}/s"),
            ("last success", status.last_success_at),
        )
    )
