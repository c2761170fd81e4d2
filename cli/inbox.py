"""`postroom inbox …`: read what the daemon has received, and follow it (docs/contract/delivery.md#delivery-82)."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from cli.connect import with_daemon
from cli.noun import Json, Socket, moment, named, noun, with_options
from cli.output import ago, json_line, line, note, table

if TYPE_CHECKING:
    from postroom import Client, InboxMessage

app = noun("Read what the daemon has received, and follow it.")

_COLUMNS: Final = ("POSITION", "FROM", "TO", "RECEIVED", "CLIENT MESSAGE ID")
_PREVIEW: Final = 60  # characters of a body
_FOR_EVER: Final = float("inf")


class Filters(NamedTuple):
    """Which messages are meant."""

    since: Annotated[
        datetime | None,
        typer.Option(
            "--since", parser=moment, help="Received in the last 90s, 15m, 7d, or from a time on.", metavar="TIME"
        ),
    ] = None
    sender: Annotated[
        str | None,
        typer.Option("--from", help="Only from this member.", metavar="MEMBER", callback=named("member")),
    ] = None
    destination: Annotated[
        str | None, typer.Option("--to", help="Only to this destination, as in topic:orders.", metavar="DESTINATION")
    ] = None

    def members(self) -> dict[str, Any]:
        """Return them as the members of a query; raises `InvalidMessage` for what is not a destination."""
        from postroom._wire.message import parse_destination  # noqa: PLC0415

        if self.destination is not None:
            parse_destination(self.destination)  # a misspelt one would match nothing, and say nothing
        return self._asdict()


@app.command("list")
@with_options
def list_(
    *,
    filters: Filters,
    limit: Annotated[int, typer.Option(min=1, help="How many messages to show.")] = 50,
    everything: Annotated[bool, typer.Option("--all", help="All messages, without a limit.")] = False,
    cursor: Annotated[str | None, typer.Option(help="Continue where the last list ended.")] = None,
    body: Annotated[bool, typer.Option("--body", help="Show the bodies too.")] = False,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """List received messages, oldest first; with --body also their bodies, shortened in a table."""
    from msgspec.structs import replace  # noqa: PLC0415

    from postroom import InboxQuery  # noqa: PLC0415
    from postroom._wire.sends import MAX_PAGE  # noqa: PLC0415

    query = InboxQuery(**filters.members(), cursor=cursor)
    shown: list[InboxMessage] = []

    def work(client: Client) -> str | None:
        count, after = 0, cursor
        while True:
            size = MAX_PAGE if everything else min(MAX_PAGE, limit - count)
            page = client.inbox(replace(query, cursor=after, limit=size))
            count, after = count + len(page.messages), page.next_cursor
            if as_json:
                for message in page.messages:
                    json_line(message if body else replace(message, body=None, body_base64=None, meta=None))
            else:
                shown.extend(page.messages)
            if after is None or (not everything and count == limit):
                return after

    next_cursor = with_daemon(socket, work)
    if shown:
        cells = (
            (
                message.position,
                message.sender,
                message.to,
                f"{ago(message.received_at)} ago",
                message.client_message_id,
                *([_preview(message)] if body else ()),
            )
            for message in shown
        )
        table((*_COLUMNS, "BODY") if body else _COLUMNS, cells)
    elif not as_json:
        line("no messages")
    if next_cursor is not None:
        note(f"There are more messages: --all, or --cursor {next_cursor}")


@app.command()
@with_options
def tail(*, filters: Filters, as_json: Json = False, socket: Socket = None) -> None:
    """Follow what the daemon receives, a line per message, until Ctrl-C; waits while the daemon restarts."""
    from postroom import EventsQuery, InboxQuery  # noqa: PLC0415

    query = EventsQuery(**filters.members())

    def work(client: Client) -> None:
        client.inbox(InboxQuery(limit=1))  # says at once where there is no daemon, or no inbox
        with closing(client.events(query, patience=_FOR_EVER)) as messages:
            for message in messages:
                if as_json:
                    json_line(message, flush=True)
                else:
                    received = f"{message.received_at:%H:%M:%S}  {message.sender} → {message.to}"
                    line(f"{received}  {_preview(message)}", flush=True)

    with_daemon(socket, work)


def _preview(message: InboxMessage) -> str:
    if message.body is None:
        from postroom._wire.words import counted  # noqa: PLC0415

        return f"({counted(len(message.body_base64 or '') * 3 // 4, 'byte')})"
    text = " ".join(message.body.split())
    return text if len(text) <= _PREVIEW else f"{text[: _PREVIEW - 1]}…"
