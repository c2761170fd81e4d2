"""`postroom dlq …`: see, replay and drop what could not be handled (docs/contract/delivery.md#delivery-51)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
import typer

from cli.connect import mesh_of, with_broker
from cli.noun import All, DryRun, Json, Reach, Reason, Yes, age, chosen_ids, noun, with_options
from cli.output import ago, confirm, fields, json_line, line, listing, note, reason_or_ask, table
from postroom._wire.dead_letters import DEAD_LETTERS, Letter, LetterFilter, LetterNote, LettersQuery
from postroom._wire.nouns import CHANGES, Result
from postroom.chassis.exits import Exit, Fatal
from postroom.errors import Problem, error_for

if TYPE_CHECKING:
    from postroom import BrokerClient

app = noun("See, replay and drop messages that could not be handled.")

Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="Dead letters by id or message id; `-` reads them from standard input."),
]

SECONDS: Final = 120.0  # that one request may take: it may replay some hundred letters
PAGE: Final = CHANGES  # letters asked for at once
_COLUMNS: Final = ("ID", "MESSAGE ID", "SUBJECT", "REASON", "TRIES", "AGE", "CONSUMER", "LAST ERROR")
_NOTE_COLUMNS: Final = ("AT", "DONE", "BY", "MESSAGE ID", "AS", "REASON", "WHY")


class Filters(NamedTuple):
    """Which letters are meant."""

    subject: Annotated[
        str | None, typer.Option("--subject", metavar="SUBJECT", help="Only from this subject; * and > as in NATS.")
    ] = None
    code: Annotated[
        str | None, typer.Option("--code", metavar="REASON", help="Only with this reason, such as max_deliver.")
    ] = None
    consumer: Annotated[str | None, typer.Option("--consumer", metavar="NAME", help="Only of this consumer.")] = None
    older_than: Annotated[
        float | None,
        typer.Option(
            parser=age, metavar="DURATION", help="Only dead for longer than 90s, 15m, 7d, or since before a time."
        ),
    ] = None

    def conditions(self) -> dict[str, Any]:
        """Return them as the members of a query or a filter."""
        return {
            "subject": self.subject,
            "reason": self.code,
            "consumer": self.consumer,
            "older_than_seconds": self.older_than,
        }


class Change(NamedTuple):
    """Which letters a verb settles, and how."""

    everything: All = False
    filters: Filters = Filters()
    reason: Reason = None
    dry_run: DryRun = False
    yes: Yes = False
    reach: Reach = Reach()
    as_json: Json = False

    def meant(self, ids: Sequence[str]) -> LetterFilter:
        """Return what the ids or, with `--all`, the filters mean."""
        if bool(ids) == self.everything:
            raise Fatal(Exit.USAGE, "name dead letters by their ids, or use --all with filters")
        if ids and self.filters != Filters():
            raise Fatal(Exit.USAGE, "filters need --all")
        return LetterFilter(ids=frozenset(ids)) if ids else LetterFilter(**self.filters.conditions())


@app.command("list")
@with_options
def list_(*, filters: Filters, reach: Reach, as_json: Json = False) -> None:
    """List dead letters, oldest first; never their payloads."""
    found: list[Letter] = []

    async def work(client: BrokerClient) -> Problem | None:
        query = LettersQuery(mesh=await mesh_of(client, reach.mesh), limit=PAGE, **filters.conditions())
        while True:
            page = await client.list_things(DEAD_LETTERS, query)
            if as_json:
                for letter in page.letters:
                    json_line(_members(letter))
            found.extend(page.letters)
            if page.next_cursor is None:
                return page.unread
            query = msgspec.structs.replace(query, cursor=page.next_cursor)

    unread = with_broker(reach.url, reach.token_file, work, timeout=SECONDS)
    if not as_json and found:
        table(_COLUMNS, map(_cells, found))
    elif not as_json and unread is None:
        line("no dead letters")
    _say_unread(unread)


@app.command()
@with_options
def inspect(*, ids: Ids = None, reach: Reach, as_json: Json = False) -> None:
    """Show a whole dead letter: the reason, its headers and its payload."""
    chosen = chosen_ids(ids)
    if not chosen:
        raise Fatal(Exit.USAGE, "name a dead letter by its id or message id (`postroom dlq list` shows them)")

    async def work(client: BrokerClient) -> Problem | None:
        mesh = await mesh_of(client, reach.mesh)
        pages = [await client.inspect(DEAD_LETTERS, mesh, each) for each in chosen]
        shown = {letter.id: letter for page in pages for letter in page.letters}
        for letter in shown.values():
            json_line(_members(letter)) if as_json else fields(_members(letter).items())
        return pages[0].unread

    _say_unread(with_broker(reach.url, reach.token_file, work, timeout=SECONDS))


def _register(verb: str) -> None:
    """Make the command of a verb that settles letters."""

    def command(*, ids: Ids = None, change: Change) -> None:
        _settle(verb, chosen_ids(ids), change)

    app.command(verb, help=DEAD_LETTERS.verbs[verb].effect)(with_options(command))


for _verb in DEAD_LETTERS.verbs:
    _register(_verb)


@app.command()
@with_options
def log(*, reach: Reach, as_json: Json = False) -> None:
    """Show what operators replayed and dropped, and why."""

    async def work(client: BrokerClient) -> list[LetterNote]:
        return (await client.log(DEAD_LETTERS, await mesh_of(client, reach.mesh))).notes

    listing(
        with_broker(reach.url, reach.token_file, work),
        _NOTE_COLUMNS,
        lambda note: (note.at, note.act, note.actor, note.message_id, note.new_message_id, note.reason, note.why),
        as_json=as_json,
    )


def _settle(verb: str, ids: Sequence[str], change: Change) -> None:
    """Do `verb` to every letter that is meant, after a question; exit code 1 where it failed for some."""
    meant = change.meant(ids)
    why = reason_or_ask(change.reason, dry_run=change.dry_run)

    def ask(wanted: LetterFilter, *, dry_run: bool) -> Result[Letter]:
        async def work(client: BrokerClient) -> Result[Letter]:
            mesh = await mesh_of(client, change.reach.mesh)
            return await client.change(DEAD_LETTERS, verb, wanted, mesh=mesh, reason=why, dry_run=dry_run)

        return with_broker(change.reach.url, change.reach.token_file, work, timeout=SECONDS)

    planned = ask(meant, dry_run=True)
    failed = 0
    if change.dry_run:
        _say_done(planned, change)
    elif planned.done:
        confirm(f"{verb.capitalize()} {len(planned.done)} dead letters?", yes=change.yes)
        for start in range(0, len(planned.done), CHANGES):
            portion = frozenset(letter.id for letter in planned.done[start : start + CHANGES])
            done = ask(LetterFilter(ids=portion), dry_run=False)
            failed += len(done.failed)
            _say_done(done, change)
    if not change.as_json:
        what = f"{'would be ' if change.dry_run else ''}{DEAD_LETTERS.verbs[verb].done}"
        line(f"{len(planned.done) - failed} {what}, {failed} failed")
    if failed:
        raise SystemExit(Exit.FAILED)
    if not ids:
        _say_unread(planned.unread)


def _say_done(result: Result[Letter], change: Change) -> None:
    for failure in result.failed:
        note(f"{failure.id}: {failure.problem.detail}")
    for letter in result.done if change.as_json else ():
        json_line({**_members(letter), "done": not change.dry_run})


def _say_unread(unread: Problem | None) -> None:
    """Say that there may be more letters; where the broker ought to know them, the command fails."""
    if unread is None:
        return
    if unread.code != "nats_not_configured":
        raise error_for(unread)
    note(unread.detail)


def _members(letter: Letter) -> dict[str, Any]:
    """Return a letter as names and values; what is no letter has nothing but its id."""
    whole: dict[str, Any] = msgspec.to_builtins(letter)
    return {"id": letter.id, **whole.pop("letter", {}), **whole}


def _cells(found: Letter) -> tuple[Any, ...]:
    letter = found.letter
    if letter is None:
        return (found.id, None, None, "(not a dead letter)", None, None, None, None)
    return (
        found.id,
        letter.message_id,
        letter.original_subject,
        letter.reason,
        letter.attempts,
        ago(letter.died_at),
        letter.consumer,
        letter.last_error,
    )
