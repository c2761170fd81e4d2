"""`postroom inbox …`: read what the daemon has received, and follow it (docs/contract/delivery.md#delivery-82)."""

from contextlib import closing
from datetime import datetime
from typing import Annotated, Any, Final, NamedTuple

import typer
from msgspec.structs import replace

from cli import completion
from cli.connect import with_daemon
from cli.noun import Json, Paging, Socket, moment, named, noun
from cli.output import json_line, line
from postroom import Client, EventsQuery, InboxMessage, InboxQuery
from postroom._wire.message import parse_destination
from postroom._wire.words import ago, counted

app = noun()

_COLUMNS: Final = ("POSITION", "FROM", "TO", "RECEIVED", "CLIENT MESSAGE ID")
_PREVIEW: Final = 60  # characters of a body
_UNLIMITED: Final = float("inf")


class Filters(NamedTuple):
    """The conditions that messages match."""

    since: Annotated[
        datetime | None,
        typer.Option(parser=moment, help="Received in the last 90s, 15m, 7d, or from a time on.", metavar="TIME"),
    ] = None
    sender: Annotated[
        str | None, typer.Option("--from", help="Only from this member.", metavar="MEMBER", **named("member"))
    ] = None
    destination: Annotated[
        str | None,
        typer.Option(
            "--to",
            help="Only to this destination, as in topic:orders.",
            metavar="DESTINATION",
            autocompletion=completion.destinations,
        ),
    ] = None

    def members(self) -> dict[str, Any]:
        """Return them as the members of a query; raises `InvalidMessage` for what is not a destination."""
        if self.destination is not None:
            parse_destination(self.destination)  # a misspelt one would match nothing, and say nothing
        return self._asdict()


@app.command("list")
def list_(
    *,
    filters: Filters,
    paging: Paging,
    body: Annotated[bool, typer.Option("--body", help="Show the bodies too.")] = False,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """List received messages, oldest first; with --body also their bodies, shortened in a table."""
    query = InboxQuery(**filters.members())

    def cells(message: InboxMessage) -> tuple[Any, ...]:
        received, preview = f"{ago(message.received_at)} ago", [_preview(message)] if body else []
        return (message.position, message.sender, message.to, received, message.client_message_id, *preview)

    def work(client: Client) -> None:
        def ask(after: str | None, size: int) -> tuple[list[InboxMessage], str | None]:
            page = client.inbox(replace(query, cursor=after, limit=size))
            if body:
                return page.messages, page.next_cursor
            return [replace(one, body=None, body_base64=None, meta=None) for one in page.messages], page.next_cursor

        paging.show(ask, (*_COLUMNS, "BODY") if body else _COLUMNS, cells, things="messages", as_json=as_json)

    with_daemon(socket, work)


@app.command()
def tail(*, filters: Filters, as_json: Json = False, socket: Socket = None) -> None:
    """Follow what the daemon receives, a line per message, until Ctrl-C; waits while the daemon restarts."""
    query = EventsQuery(**filters.members())

    def work(client: Client) -> None:
        client.inbox(InboxQuery(limit=1))  # says at once where there is no daemon, or no inbox
        with closing(client.events(query, patience=_UNLIMITED)) as messages:
            for message in messages:
                if as_json:
                    json_line(message, flush=True)
                else:
                    received = f"{message.received_at:%H:%M:%S}  {message.sender} → {message.to}"
                    line(f"{received}  {_preview(message)}", flush=True)

    with_daemon(socket, work)


def _preview(message: InboxMessage) -> str:
    if message.body is None:
        return f"({counted(len(message.body_base64 or '') * 3 // 4, 'byte')})"
    text = " ".join(message.body.split())
    return text if len(text) <= _PREVIEW else f"{text[: _PREVIEW - 1]}…"
