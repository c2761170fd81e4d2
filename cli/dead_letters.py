"""`postroom dlq …`: see, replay and drop what could not be handled (docs/contract/delivery.md#delivery-51)."""

from functools import partial
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import typer

from cli import completion
from cli.change import SECONDS, Change, asking, change_all, check_choice
from cli.noun import Json, OlderThan, Reach, chosen_ids, noun, several
from cli.output import fields, json_line, line, listing, note, table
from postroom import BrokerClient
from postroom._wire.dead_letters import DEAD_LETTERS, Letter, LetterFilter, LettersQuery
from postroom._wire.nouns import CHANGES
from postroom._wire.words import ago
from postroom.chassis.exits import Exit, Fatal
from postroom.errors import Problem, error_for

app = noun()

Ids = Annotated[list[str] | None, several("Dead letters by id or message id", completion.letters)]

_COLUMNS: Final = ("ID", "MESSAGE ID", "SUBJECT", "REASON", "TRIES", "AGE", "CONSUMER", "LAST ERROR")


class Filters(NamedTuple):
    """The conditions that letters match."""

    subject: Annotated[
        str | None, typer.Option(metavar="SUBJECT", help="Only from this subject; * and > as in NATS.")
    ] = None
    code: Annotated[str | None, typer.Option(metavar="REASON", help="Only with this reason, such as max_deliver.")] = (
        None
    )
    consumer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only of this consumer.", autocompletion=completion.consumers)
    ] = None
    older_than: OlderThan = None

    def conditions(self) -> dict[str, Any]:
        """Return them as the members of a query or a filter."""
        return {"subject": self.subject, "reason": self.code, "consumer": self.consumer, **(self.older_than or {})}


@app.command("list")
def list_(*, filters: Filters, reach: Reach, as_json: Json = False) -> None:
    """List dead letters, oldest first; never their payloads."""
    found: list[Letter] = []

    async def work(client: BrokerClient, mesh: str) -> Problem | None:
        query = LettersQuery(mesh=mesh, limit=CHANGES, **filters.conditions())
        while True:
            page = await client.list_things(DEAD_LETTERS, query)
            if as_json:
                for letter in page.letters:
                    json_line(_members(letter))
            found.extend(page.letters)
            if page.next_cursor is None:
                return page.unread
            query = msgspec.structs.replace(query, cursor=page.next_cursor)

    unread = reach.ask(work, timeout=SECONDS)
    if not as_json and found:
        table(_COLUMNS, map(_cells, found))
    elif not as_json and unread is None:
        line("no dead letters")
    _say_unread(unread)


@app.command()
def inspect(*, ids: Ids = None, reach: Reach, as_json: Json = False) -> None:
    """Show a whole dead letter: the reason, its headers and its payload."""
    chosen = chosen_ids(ids)
    if not chosen:
        raise Fatal(Exit.USAGE, "name a dead letter by its id or message id (`postroom dlq list` shows them)")

    async def work(client: BrokerClient, mesh: str) -> Problem | None:
        pages = [await client.inspect(DEAD_LETTERS, mesh, each) for each in chosen]
        shown = {letter.id: letter for page in pages for letter in page.letters}
        for letter in shown.values():
            json_line(_members(letter)) if as_json else fields(_members(letter).items())
        return pages[0].unread

    _say_unread(reach.ask(work, timeout=SECONDS))


def settle(verb: str, *, ids: Ids = None, filters: Filters, change: Change, reach: Reach) -> None:
    """Do `verb` to each chosen letter; exit code 1 if it failed for some."""
    chosen = chosen_ids(ids)
    check_choice("dead letter", "dlq", chosen, change, filtered=filters != Filters())
    mesh = reach.broker.ask(reach.mesh_of)
    ask = asking(DEAD_LETTERS, verb, LetterFilter(**filters.conditions()), reach, mesh=mesh)
    done, failed, unread = 0, 0, None
    for portion in change_all("dead letter", verb, chosen, change, ask):
        for id_, problem in portion.failed.items():
            note(f"{id_}: {problem.detail}")
        for letter in portion.done if change.as_json else ():
            json_line({**_members(letter), "done": not change.dry_run})
        done, failed, unread = done + len(portion.done), failed + len(portion.failed), portion.unread or unread
    if not change.as_json:
        line(f"{done} {'would be ' * change.dry_run}{DEAD_LETTERS.verbs[verb].done}, {failed} failed")
    if failed:
        raise SystemExit(Exit.FAILED)
    if not chosen:
        _say_unread(unread)


for _verb, _table in DEAD_LETTERS.verbs.items():
    app.command(_verb, help=_table.effect)(partial(settle, _verb))


@app.command()
def log(*, reach: Reach, as_json: Json = False) -> None:
    """Show what operators replayed and dropped last, and why; `postroom log --noun 'dead letter'` shows all of it."""
    listing(
        reach.ask(lambda client, mesh: client.log(DEAD_LETTERS, mesh)).notes,
        ("AT", "DONE", "BY", "MESSAGE ID", "AS", "REASON", "WHY"),
        lambda note: (note.at, note.act, note.actor, note.message_id, note.new_message_id, note.reason, note.why),
        things="dead letters were settled",
        as_json=as_json,
    )


def _say_unread(unread: Problem | None) -> None:
    """Say that there may be more letters; the command fails unless the broker has no NATS to read them from."""
    if unread is None:
        return
    if unread.code != "nats_not_configured":
        raise error_for(unread)
    note(unread.detail)


def _members(letter: Letter) -> dict[str, Any]:
    """Return a letter as names and values; what cannot be read as one has only its id."""
    whole: dict[str, Any] = msgspec.to_builtins(letter)
    return {"id": letter.id, **whole.pop("letter", {}), **whole}


def _cells(found: Letter) -> tuple[Any, ...]:
    letter = found.letter
    if letter is None:
        return (found.id, None, None, "(not a dead letter)", None, None, None, None)
    subject, tries, age = letter.original_subject, letter.attempts, ago(letter.died_at)
    return (found.id, letter.message_id, subject, letter.reason, tries, age, letter.consumer, letter.last_error)
