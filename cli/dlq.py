"""`postroom dlq …`: see what could not be handled, send it again, or drop it (spec delivery.md; operate.md, "CLI")."""

from __future__ import annotations

import getpass
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from chassis.exits import Exit, Fatal
from cli.jetstream import Credentials, NatsUrl, with_jetstream
from cli.noun import DryRun, Json, Mesh, Yes, noun
from cli.output import ago, confirm, fields, json_line, line, listing, note, reason_or_ask, table
from cli.quantities import duration
from cli.selection import chosen_ids

if TYPE_CHECKING:
    from delivery.dead_letter_stream import DeadLetterStream, LetterFilter, StoredLetter

    Act: TypeAlias = Callable[[DeadLetterStream, StoredLetter, str], Awaitable[dict[str, Any]]]

app = noun("See, replay and drop messages that could not be handled.")

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="Dead letters by id or message id; `-` reads them from standard input."),
]
All = Annotated[bool, typer.Option("--all", help="Every dead letter that the filters match.")]
SubjectFilter = Annotated[
    str | None, typer.Option("--subject", metavar="SUBJECT", help="Only from this subject; * and > as in NATS.")
]
Code = Annotated[str | None, typer.Option("--code", metavar="REASON", help="Only with this reason, as max_deliver.")]
Consumer = Annotated[str | None, typer.Option("--consumer", metavar="NAME", help="Only of this consumer.")]
OlderThan = Annotated[
    float | None, typer.Option(parser=duration, metavar="DURATION", help="Only dead for longer than 90s, 15m, 7d.")
]
Why = Annotated[
    str | None,
    typer.Option("--reason", help="Why; kept beside the dead letters. Asked for on a terminal.", metavar="TEXT"),
]

_COLUMNS: Final = ("ID", "MESSAGE ID", "SUBJECT", "REASON", "TRIES", "AGE", "CONSUMER", "LAST ERROR")
_DONE: Final = {"replay": "replayed", "drop": "dropped"}
_NOTE_COLUMNS: Final = ("AT", "DONE", "BY", "MESSAGE ID", "AS", "REASON", "WHY")


@app.command("list")
def list_(
    *,
    subject: SubjectFilter = None,
    code: Code = None,
    consumer: Consumer = None,
    older_than: OlderThan = None,
    mesh: Mesh = None,
    nats_url: NatsUrl = None,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """List dead letters, oldest first; never their payloads."""
    wanted = _filter(None, subject, code, consumer, older_than)
    found = _with_letters(mesh, nats_url, credentials, lambda letters: letters.find(wanted))
    if as_json:
        for stored in found:
            json_line(_members(stored, whole=False))
    else:
        table(_COLUMNS, map(_cells, found)) if found else line("no dead letters")


@app.command()
def inspect(
    *,
    ids: Ids = None,
    mesh: Mesh = None,
    nats_url: NatsUrl = None,
    credentials: Credentials = None,
    as_json: Json = False,
) -> None:
    """Show a dead letter whole: why it died, its headers and its payload."""
    chosen = chosen_ids(ids)
    if not chosen:
        raise Fatal(Exit.USAGE, "name a dead letter by its id or message id (`postroom dlq list` shows them)")
    wanted = _filter(chosen, None, None, None, None)
    for stored in _with_letters(mesh, nats_url, credentials, lambda letters: letters.find(wanted)):
        json_line(_members(stored, whole=True)) if as_json else fields(_members(stored, whole=True).items())


async def _replayed(letters: DeadLetterStream, stored: StoredLetter, why: str) -> dict[str, Any]:
    return {"new_message_id": await letters.replay(stored, why=why)}


async def _dropped(letters: DeadLetterStream, stored: StoredLetter, why: str) -> dict[str, Any]:
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
            reach=(mesh, nats_url, credentials),
        )


_settling(
    "replay",
    _replayed,
    "Send messages again, each under a fresh id, to the consumer that buried them; their dead letters go.",
)
_settling("drop", _dropped, "Remove dead letters for good; a note of each is kept, its payload is not.")


@app.command()
def log(*, mesh: Mesh = None, nats_url: NatsUrl = None, credentials: Credentials = None, as_json: Json = False) -> None:
    """Show what operators replayed and dropped, and why."""
    notes = _with_letters(mesh, nats_url, credentials, lambda letters: letters.notes())
    listing(
        notes,
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
    reach: tuple[str | None, str | None, Path | None],
) -> None:
    """Do `act` to every letter that is meant, after a question; exit code 1 where it failed for some."""
    from postroom import PostroomError  # noqa: PLC0415

    why = "" if dry_run else reason_or_ask(reason)
    found = _with_letters(*reach, lambda letters: letters.find(wanted))
    if not dry_run and found:
        confirm(f"{verb.capitalize()} {len(found)} dead letters?", yes=yes)

    async def work(letters: DeadLetterStream) -> int:
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

    failed = _with_letters(*reach, work) if found else 0
    if not as_json:
        line(f"{len(found) - failed} {'would be ' if dry_run else ''}{_DONE[verb]}, {failed} failed")
    if failed:
        raise SystemExit(Exit.FAILED)


def _with_letters(
    mesh: str | None, url: str | None, credentials: Path | None, work: Callable[[DeadLetterStream], Awaitable[Any]]
) -> Any:
    from delivery.dead_letter_stream import DeadLetterStream  # noqa: PLC0415

    if mesh is None:
        raise Fatal(Exit.USAGE, "say which mesh with --mesh, or set POSTROOM_MESH")
    return with_jetstream(url, credentials, lambda js: work(DeadLetterStream(js, mesh, actor=getpass.getuser())))


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
    from delivery.dead_letter_stream import LetterFilter  # noqa: PLC0415

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
        return (stored.id, None, None, "(no dead letter of ours)", None, None, None, None)
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
