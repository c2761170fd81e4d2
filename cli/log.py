"""`postroom log`: what operators did, at the broker and at the daemon (docs/contract/operate.md#operate-37)."""

import heapq
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cli.connect import with_daemon
from cli.main import ending
from cli.noun import Json, OutboxPlace, Socket, choice, named, noun, recent
from cli.output import listing, note
from postroom._wire.administration import MAX_PAGE
from postroom._wire.nouns import OPERATOR_LOG, LogLine, LogPage, LogQuery
from postroom._wire.transport import find_socket
from postroom._wire.words import counted
from postroom.chassis.exits import Fatal
from postroom.errors import PostroomError

app = noun()


class Placed(LogLine, kw_only=True, frozen=True):
    """A line, and in whose log it is: the broker's, an application's, or that of the daemon with this socket."""

    where: str


@app.command()
def log(
    *,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="SLUG",
            help="Only about this mesh, and what is in it [default: all that the token may see].",
            **named("mesh"),
        ),
    ] = None,
    thing: Annotated[
        str | None, typer.Option("--noun", metavar="NOUN", help="Only of a kind, such as job, row or relay.")
    ] = None,
    verb: Annotated[str | None, typer.Option(metavar="VERB", help="Only by a verb, such as cancel.")] = None,
    actor: Annotated[str | None, typer.Option(metavar="WHO", help="Only by this one, such as administrator.")] = None,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Only of this thing, as the list shows it.")] = None,
    since: Annotated[
        dict[str, Any] | None,
        typer.Option(parser=recent, metavar="TIME", help="Only from a time on, or in the last 90s, 15m, 7d."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="How many lines to show.")] = 50,
    place: Annotated[
        str | None,
        typer.Option(
            "--at",
            metavar="PLACE",
            **choice("place", ("broker", "daemon")),
            help="Only the log of the broker, or of the daemon [default: both].",
        ),
    ] = None,
    socket: Socket = None,
    outbox: OutboxPlace,
    as_json: Json = False,
) -> None:
    """Show what operators did at the broker and at this host's daemon, and why, the latest first.

    With --database, what they did in the outbox of an application takes the place of what they did at the broker.

    What cannot be asked is named on standard error, and the exit code says so; the rest is shown.

    \b
        postroom log --noun job --limit 10
        postroom log --actor lea --since 1d
        postroom log --mesh sea
    """  # noqa: D301 - \b: as it stands
    query = LogQuery(mesh=mesh, noun=thing, verb=verb, actor=actor, key=key, **(since or {}))

    def broker() -> list[Placed]:
        def ask(query: LogQuery) -> LogPage:
            return outbox.ask(lambda client: client.list_things(OPERATOR_LOG, query), lambda own: own.log(query))

        return _latest(ask, query, limit, "broker" if outbox.database is None else "application")

    def daemon() -> list[Placed]:
        path = Path(find_socket(socket))
        return _latest(lambda query: with_daemon(path, lambda client: client.log(query)), query, limit, str(path))

    found: list[list[Placed]] = []
    code = 0
    for name, read in {"broker": broker, "daemon": daemon}.items():
        if place in (None, name):
            try:
                found.append(read())
            except (Fatal, PostroomError) as error:
                end = ending(error)
                note(f"postroom: the log of the {name} is missing: {end.sentence}")
                code = code or end.exit_code
    lines = list(heapq.merge(*found, key=lambda line: line.at, reverse=True))
    listing(
        lines[:limit],
        ("AT", "WHERE", "BY", "VERB", "NOUN", "KEY", "OUTCOME", "REASON"),
        lambda one: (one.at, one.where, one.actor, one.verb, one.noun, one.key, one.outcome, one.reason),
        things="lines match",
        as_json=as_json,
    )
    if len(lines) > limit:
        note(f"{counted(limit, 'line')} shown, and there are older ones: `--limit {10 * limit}` shows more")
    if code:
        raise typer.Exit(code)


def _latest(ask: Callable[[LogQuery], LogPage], query: LogQuery, limit: int, where: str) -> list[Placed]:
    """Read page by page until there is a line more than are shown, or no other."""
    lines: list[Placed] = []
    cursor: int | None = None
    while len(lines) <= limit:
        size = min(limit + 1 - len(lines), MAX_PAGE)
        page = ask(msgspec.structs.replace(query, cursor=cursor, limit=size))
        lines += [Placed(where=where, **msgspec.structs.asdict(line)) for line in page.lines]
        cursor = page.next_cursor
        if cursor is None:
            break
    return lines
