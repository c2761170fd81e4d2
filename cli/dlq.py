"""`postroom dlq …`: see, replay and drop what could not be handled (docs/contract/delivery.md#delivery-51)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias

import typer

from cli.jetstream import Credentials, NatsUrl, reached
from cli.noun import Database, DryRun, Json, Mesh, Yes, noun
from cli.output import ago, confirm, fields, json_line, line, listing, note, reason_or_ask, table
from cli.quantities import age
from cli.selection import chosen_ids
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import this_user

if TYPE_CHECKING:
    from postroom.delivery.dead_letters.operations import LetterFilter, LetterOperations, StoredLetter

    Act: TypeAlias = Callable[[LetterOperations, StoredLetter, str], Awaitable[dict[str, Any]]]

app = noun("See, replay and drop messages that could not be handled.")

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="Dead letters by id or message id; `-` reads them from standard input."),
]
All = Annotated[bool, typer.Option("--all", help="Every dead letter that the filters match.")]
SubjectFilter = Annotated[
    str | None, typer.Option("--subject", metavar="SUBJECT", help="Only from this subject; * and > as in NATS.")
]
Code = Annotated[
    str | None, typer.Option("--code", metavar="REASON", help="Only with this reason, such as max_deliver.")
]
Consumer = Annotated[str | None, typer.Option("--consumer", metavar="NAME", help="Only of this consumer.")]
OlderThan = Annotated[
    float | None,
    typer.Option(
        parser=age, metavar="DURATION", help="Only dead for longer than 90s, 15m, 7d, or since before a time."
    ),
]
Why = Annotated[
    str | None,
    typer.Option("--reason", help="Why; kept in `log`. Asked for on a terminal.", metavar="TEXT"),
]

_COLUMNS: Final = ("ID", "MESSAGE ID", "SUBJECT", "REASON", "TRIES", "AGE", "CONSUMER", "LAST ERROR")
_DONE: Final = {"replay": "replayed", "drop": "dropped"}
_NOTE_COLUMNS: Final = ("AT", "DONE", "BY", "MESSAGE ID", "AS", "REASON", "WHY")


class _Reach(NamedTuple):
    """Which letters are meant, and where they are."""

    mesh: str | None
    database: str | None
    nats_url: str | None
    credentials: Path | None


@app.command("list")
def list_(
    *,
    subject: SubjectFilter = None,
    code: Code = None,
    consumer: Consumer = None,
    older_than: OlderThan = None,
    mesh: Mesh = None,
    database: Database = None,
    nats_url: NatsUrl = None,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """List dead letters, oldest first; never their payloads."""
    wanted = _filter(None, subject, code, consumer, older_than)

    def show(found: list[StoredLetter], *, complete: bool) -> None:
        if as_json:
            for stored in found:
                json_line(_members(stored, whole=False))
        elif found:
            table(_COLUMNS, map(_cells, found))
        elif complete:
            line("no dead letters")

    _look(_Reach(mesh, database, nats_url, credentials), wanted, show)


@app.command()
def inspect(
    *,
    ids: Ids = None,
    mesh: Mesh = None,
    database: Database = None,
    nats_url: NatsUrl = None,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Show a whole dead letter: the reason, its headers and its payload."""
    chosen = chosen_ids(ids)
    if not chosen:
        raise Fatal(Exit.USAGE, "name a dead letter by its id or message id (`postroom dlq list` shows them)")
    wanted = _filter(chosen, None, None, None, None)

    def show(found: list[StoredLetter], **_: bool) -> None:
        for stored in found:
            json_line(_members(stored, whole=True)) if as_json else fields(_members(stored, whole=True).items())

    _look(_Reach(mesh, database, nats_url, credentials), wanted, show, payloads=True)


async def _replayed(letters: LetterOperations, stored: StoredLetter, why: str) -> dict[str, Any]:
    return {"new_message_id": await letters.replay(stored, why=why)}


async def _dropped(letters: LetterOperations, stored: StoredLetter, why: str) -> dict[str, Any]:
    await letters.drop(stored, why=why)
    return {}


def _settling(verb: str, act: Act, help_text: str) -> None:
    """Make the verb that does `act` to every letter that its ids or its filters mean."""

    @app.command(verb, help=help_text)
    def settle(
        *,
        ids: Ids = None,
        everything: All = False,
        subject: SubjectFilter = None,
        code: Code = None,
        consumer: Consumer = None,
        older_than: OlderThan = None,
        reason: Why = None,
        dry_run: DryRun = False,
        yes: Yes = False,
        mesh: Mesh = None,
        database: Database = None,
        nats_url: NatsUrl = None,
        credentials: Credentials = None,
        as_json: Json = False,
    ) -> None:
        filters = {"subject": subject, "code": code, "consumer": consumer, "older_than": older_than}
        _settle(
            verb,
            _chosen(ids, everything=everything, **filters),
            act,
            reason=reason,
            dry_run=dry_run,
            yes=yes,
            as_json=as_json,
            reach=_Reach(mesh, database, nats_url, credentials),
        )


_settling(
    "replay",
    _replayed,
    "Send messages again, each under a fresh id, to the consumer that could not "
    "handle them; their letters are settled.",
)
_settling(
    "drop", _dropped, "Settle dead letters that will not be handled; a record of each is kept, without its payload."
)


@app.command()
def log(
    *,
    mesh: Mesh = None,
    database: Database = None,
    nats_url: NatsUrl = None,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Show what operators replayed and dropped, and why."""
    reach = _Reach(mesh, database, nats_url, credentials)
    listing(
        _with_letters(reach, lambda letters: letters.notes(), []),
        _NOTE_COLUMNS,
        lambda note: (note.at, note.act, note.actor, note.message_id, note.new_message_id, note.reason, note.why),
        as_json=as_json,
    )


def _settle(
    verb: str,
    wanted: LetterFilter,
    act: Act,
    *,
    reason: str | None,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    reach: _Reach,
) -> None:
    """Do `act` to every letter that is meant, after a question; exit code 1 where it failed for some."""
    from postroom import PostroomError  # noqa: PLC0415

    why = "" if dry_run else reason_or_ask(reason)
    unreachable: list[PostroomError] | None = [] if verb == "drop" else None  # a row is dropped without NATS
    found = _with_letters(reach, lambda letters: letters.find(wanted), unreachable)
    if not dry_run and found:
        confirm(f"{verb.capitalize()} {len(found)} dead letters?", yes=yes)

    async def work(letters: LetterOperations) -> int:
        failed = 0
        for stored in found:
            members = _members(stored, whole=False)
            try:
                members |= {} if dry_run else await act(letters, stored, why)
            except PostroomError as error:
                failed += 1
                note(f"{stored.id}: {error}")
                continue
            if as_json:
                json_line({**members, "done": not dry_run})
        return failed

    failed = _with_letters(reach, work, unreachable) if found else 0
    if not as_json:
        line(f"{len(found) - failed} {'would be ' if dry_run else ''}{_DONE[verb]}, {failed} failed")
    if failed:
        raise SystemExit(Exit.FAILED)
    if unreachable and wanted.ids is None:
        raise unreachable[0]


def _look(reach: _Reach, wanted: LetterFilter, show: Callable[..., None], *, payloads: bool = False) -> None:
    """Show the letters that are meant; without NATS those of the record, and then raise what NATS failed with."""
    from postroom import PostroomError  # noqa: PLC0415

    unreachable: list[PostroomError] = []
    found = _with_letters(reach, lambda letters: letters.find(wanted, payloads=payloads), unreachable)
    if reach.database is None:
        note("only the stream was read: set POSTROOM_DATABASE_URL, or --database, to read the record of dead letters")
    show(found, complete=not unreachable)
    for error in unreachable:
        raise error


def _with_letters(
    reach: _Reach, work: Callable[[LetterOperations], Awaitable[Any]], unreachable: list[Any] | None = None
) -> Any:
    """Return what `work` returns; with a list for it, a NATS that cannot be reached is noted there and not raised."""
    from postroom import PostroomError  # noqa: PLC0415
    from postroom.chassis.postgres import acting, check_version, connected  # noqa: PLC0415
    from postroom.delivery.database import ROOM  # noqa: PLC0415
    from postroom.delivery.dead_letters.operations import LetterOperations  # noqa: PLC0415

    mesh, database, nats_url, credentials = reach
    if mesh is None:
        raise Fatal(Exit.USAGE, "name the mesh with --mesh, or set POSTROOM_MESH")

    async def run() -> Any:
        async with AsyncExitStack() as stack:
            connection = js = None
            if database is not None:
                connection = await stack.enter_async_context(connected(database))
                await check_version(connection, ROOM, migrate_with="postroom broker migrate")
            try:
                js = await stack.enter_async_context(reached(nats_url, credentials))
            except PostroomError as error:
                if connection is None or unreachable is None:
                    raise
                unreachable.append(error)
            actor = this_user() if connection is None else acting(connection)
            return await work(LetterOperations(connection, js, mesh, actor=actor))

    return asyncio.run(run())


def _chosen(ids: list[str] | None, *, everything: bool, **filters: Any) -> LetterFilter:
    """Return what the ids or, with `--all`, the filters mean."""
    chosen = chosen_ids(ids)
    if bool(chosen) == everything:
        raise Fatal(Exit.USAGE, "name dead letters by their ids, or use --all with filters")
    if chosen and any(value is not None for value in filters.values()):
        raise Fatal(Exit.USAGE, "filters need --all")
    return _filter(chosen or None, filters["subject"], filters["code"], filters["consumer"], filters["older_than"])


def _filter(
    ids: Sequence[str] | None,
    subject: str | None,
    code: str | None,
    consumer: str | None,
    older_than: float | None,
) -> LetterFilter:
    from postroom.delivery.dead_letters.operations import LetterFilter  # noqa: PLC0415

    return LetterFilter(
        ids=None if ids is None else frozenset(ids),
        subject=subject,
        reason=code,
        consumer=consumer,
        older_than_seconds=older_than,
    )


def _members(stored: StoredLetter, *, whole: bool) -> dict[str, Any]:
    """Return a letter as names and values; what is no letter has nothing but its id."""
    import msgspec  # noqa: PLC0415

    members: dict[str, Any] = {} if stored.letter is None else msgspec.to_builtins(stored.letter)
    if not whole:
        for name in ("headers", "payload", "payload_base64"):
            members.pop(name, None)
    return {"id": stored.id, **members}


def _cells(stored: StoredLetter) -> tuple[Any, ...]:
    letter = stored.letter
    if letter is None:
        return (stored.id, None, None, "(not a dead letter)", None, None, None, None)
    return (
        stored.id,
        letter.message_id,
        letter.original_subject,
        letter.reason,
        letter.attempts,
        ago(letter.died_at),
        letter.consumer,
        letter.last_error,
    )
