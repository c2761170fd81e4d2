"""`postroom inbox …`: read what the daemon has received, and follow it (docs/contract/delivery.md#delivery-82)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cli.connect import with_daemon
from cli.noun import Json, Socket, moment, named, noun
from cli.output import ago, json_line, line, note, table

if TYPE_CHECKING:
    from postroom import Client, InboxMessage, InboxQuery

app = noun("Read what the daemon has received, and follow it.")

Since = Annotated[
    datetime | None,
    typer.Option(
        "--since", parser=moment, help="Received in the last 90s, 15m, 7d, or from a time on.", metavar="TIME"
    ),
]
From = Annotated[
    str | None,
    typer.Option("--from", help="Only from this member.", metavar="MEMBER", callback=named("member")),
]
To = Annotated[
    str | None, typer.Option("--to", help="Only to this destination, as in topic:orders.", metavar="DESTINATION")
]

_COLUMNS: Final = ("POSITION", "FROM", "TO", "RECEIVED", "CLIENT MESSAGE ID")
_PREVIEW: Final = 60  # characters of a body
_FOR_EVER: Final = float("inf")


@app.command("list")
def list_(
    *,
    since: Since = None,
    sender: From = None,
    destination: To = None,
    limit: Annotated[int, typer.Option(min=1, help="How many messages to show.")] = 50,
    everything: Annotated[bool, typer.Option("--all", help="All messages, without a limit.")] = False,
    cursor: Annotated[str | None, typer.Option(help="Continue where the last list ended.")] = None,
    body: Annotated[bool, typer.Option("--body", help="Show the bodies too.")] = False,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """List received messages, oldest first; with --body also their bodies, shortened in a table."""
    moment = since
    _check(destination)
    shown: list[InboxMessage] = []

    def show(message: InboxMessage) -> None:
        if as_json:
            json_line(message if body else _without_body(message))
        else:
            shown.append(message)

    def work(client: Client) -> str | None:
        from postroom import InboxQuery  # noqa: PLC0415

        query = InboxQuery(sender=sender, destination=destination, since=moment, cursor=cursor)
        return _read(client, query, None if everything else limit, show)

    next_cursor = with_daemon(socket, work)
    if shown:
        table((*_COLUMNS, *(["BODY"] * body)), (_cells(message, body=body) for message in shown))
    elif not as_json:
        line("no messages")
    if next_cursor is not None:
        note(f"There are more messages: --all, or --cursor {next_cursor}")


@app.command()
def tail(
    *,
    since: Since = None,
    sender: From = None,
    destination: To = None,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Follow what the daemon receives, a line per message, until Ctrl-C; waits while the daemon restarts."""
    moment = since
    _check(destination)

    def work(client: Client) -> None:
        from postroom import EventsQuery, InboxQuery  # noqa: PLC0415

        client.inbox(InboxQuery(limit=1))  # says at once where there is no daemon, or no inbox
        query = EventsQuery(sender=sender, destination=destination, since=moment)
        with closing(client.events(query, patience=_FOR_EVER)) as messages:
            _follow(messages, as_json=as_json)

    with_daemon(socket, work)


def _read(client: Client, query: InboxQuery, limit: int | None, show: Callable[[InboxMessage], None]) -> str | None:
    """Show at most `limit` messages; returns the cursor that continues the list."""
    from msgspec.structs import replace  # noqa: PLC0415

    from postroom._wire.sends import MAX_PAGE  # noqa: PLC0415

    count, cursor = 0, query.cursor
    while True:
        size = MAX_PAGE if limit is None else min(MAX_PAGE, limit - count)
        page = client.inbox(replace(query, cursor=cursor, limit=size))
        count, cursor = count + len(page.messages), page.next_cursor
        for message in page.messages:
            show(message)
        if cursor is None or count == limit:
            return cursor


def _follow(messages: Iterator[InboxMessage], *, as_json: bool) -> None:
    import sys  # noqa: PLC0415

    for message in messages:
        if as_json:
            json_line(message)
        else:
            line(f"{message.received_at:%H:%M:%S}  {message.sender} → {message.to}  {_preview(message)}")
        sys.stdout.flush()


def _check(destination: str | None) -> None:
    """Refuse what is no destination: it would match nothing, and say nothing."""
    from postroom._wire.message import parse_destination  # noqa: PLC0415

    if destination is not None:
        parse_destination(destination)


def _cells(message: InboxMessage, *, body: bool) -> tuple[Any, ...]:
    received = f"{ago(message.received_at)} ago"
    cells = (message.position, message.sender, message.to, received, message.client_message_id)
    return (*cells, _preview(message)) if body else cells


def _without_body(message: InboxMessage) -> InboxMessage:
    from msgspec.structs import replace  # noqa: PLC0415

    return replace(message, body=None, body_base64=None, meta=None)


def _preview(message: InboxMessage) -> str:
    if message.body is None:
        return f"({len(message.body_base64 or '') * 3 // 4} bytes)"
    text = " ".join(message.body.split())
    return text if len(text) <= _PREVIEW else f"{text[: _PREVIEW - 1]}…"
