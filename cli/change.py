"""A verb of a noun's table on many things at once: which are meant, a question, and requests that each take moments.

The broker's nouns are tables (`postroom._wire.nouns`). What differs between two of them on the command line is how
things are named, and what is said about each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from cli.connect import with_broker
from cli.noun import DryRun, Json, Reach, Reason, Yes
from cli.output import confirm, reason_or_ask
from postroom._wire.nouns import CHANGES, Noun, Result
from postroom.chassis.exits import Exit, Fatal


class Thing(Protocol):
    """What a noun is of."""

    @property
    def id(self) -> object:
        """What verbs name it by."""


F = TypeVar("F", bound=msgspec.Struct)
T = TypeVar("T", bound=Thing)

SECONDS: Final = 120.0  # that one request may take: it may change some hundred things


class Change(NamedTuple):
    """Why a verb is done, where, and how."""

    reason: Reason = None
    dry_run: DryRun = False
    yes: Yes = False
    reach: Reach = Reach()
    as_json: Json = False


def check_choice(thing: str, group: str, ids: Sequence[str], *, everything: bool, filtered: bool) -> None:
    """Raise `Fatal` unless things are named by their ids, or are all that filters match."""
    if bool(ids) == everything:
        shown = f"`postroom {group} list` shows them"
        raise Fatal(Exit.USAGE, f"name a {thing} by its id ({shown}), or use --all with filters")
    if filtered and not everything:
        raise Fatal(Exit.USAGE, "filters need --all")


def change_all(
    noun: Noun[Any, Any, Any, Any, Any, F, T],
    verb: str,
    ids: Sequence[str],
    matching: F,
    change: Change,
    *,
    mesh: str | None,
) -> Iterator[Result[T]]:
    """Do `verb` to the things with these ids, after a question; yield what each request did.

    Without ids it is done to all things `matching`, which a dry run finds first: what the verb is not for is not meant.
    """
    why = reason_or_ask(change.reason, dry_run=change.dry_run)

    def ask(wanted: F, *, dry_run: bool) -> Result[T]:
        return with_broker(
            change.reach.url,
            change.reach.token_file,
            lambda client: client.change(noun, verb, wanted, mesh=mesh, reason=why, dry_run=dry_run),
            timeout=SECONDS,
        )

    if not ids:
        planned = ask(matching, dry_run=True)
        if change.dry_run or not planned.done:
            planned.failed.clear()
            yield planned
            return
        ids = [str(thing.id) for thing in planned.done]
    if not change.dry_run:
        confirm(f"{verb.capitalize()} {ids[0] if len(ids) == 1 else f'{len(ids)} {noun.name}s'}?", yes=change.yes)
    for begin in range(0, len(ids), CHANGES):
        portion = msgspec.convert({"ids": ids[begin : begin + CHANGES]}, type(matching))
        yield ask(portion, dry_run=change.dry_run)
