"""A verb of an operator on many things at once: which ones, a question, and requests that each take moments.

How things are named, and what they are called, differs from noun to noun; the rest is here, and the same for all. A
single named thing is changed, after a question if that cannot be undone, and a refusal fails the command. Of several,
or all that filters match, a dry run first counts what would be done; failures are reported while the others are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec

from cli.noun import All, DryRun, Json, Reach, Reason, Yes
from cli.output import confirm, json_line, line, note, progress, reason_or_ask
from postroom._wire.nouns import CHANGES, AnyNoun, Noun
from postroom._wire.words import counted
from postroom.chassis.exits import Exit, Fatal
from postroom.errors import Problem, error_for

if TYPE_CHECKING:
    from postroom import BrokerClient

F = TypeVar("F", bound=msgspec.Struct)

SECONDS: Final = 120.0  # that one request may take: it may change some hundred things, a dry run look at millions


class Change(NamedTuple):
    """Whether the verb is for all that filters match, its reason, and how it is done."""

    everything: All = False
    reason: Reason = None
    dry_run: DryRun = False
    yes: Yes = False
    as_json: Json = False


class Portion(NamedTuple):
    """What one request did, or would do: to which things, and why not to others by their ids.

    `skipped` are those that the verb is not for, `unread` is why there may be more than are known.
    """

    done: Sequence[Any]
    failed: dict[str, Problem]
    skipped: Sequence[str] = ()
    unread: Problem | None = None


class Asked(NamedTuple):
    """What is asked for: on these ids, or all that the filters match (None), why, and perhaps as a dry run.

    `show` is called with the number of things in the answers so far.
    """

    ids: Sequence[str] | None
    why: str
    dry_run: bool
    show: Callable[[int], None] = lambda _: None


Ask = Callable[[Asked], Portion]


def check_choice(thing: str, group: str, ids: Sequence[str], change: Change, *, filtered: bool) -> None:
    """Raise `Fatal` unless things are named by their ids, or are all that filters match."""
    if bool(ids) == change.everything:
        how = f"name at least one {thing} (`postroom {group} list` shows them), or use --all with filters"
        raise Fatal(Exit.USAGE, "give the ids or --all, not both" if ids else how)
    if filtered and not change.everything:
        raise Fatal(Exit.USAGE, "filters need --all")


def change_all(
    thing: str, verb: str, ids: Sequence[str], change: Change, ask: Ask, *, size: int = CHANGES, undoable: bool = False
) -> Iterator[Portion]:
    """Do `verb` to the things with these ids, else to all that the filters match; yield what each request did.

    `size` is how many things one request may be about. What is `undoable` is done to one thing without a question.
    """
    why = reason_or_ask(change.reason, dry_run=change.dry_run)

    if len(ids) == 1:  # may name several: the id of a message its letters, that of a consumer one in each stream
        asks = not (undoable or change.dry_run or change.yes)
        portion = ask(Asked(ids, why, dry_run=change.dry_run or asks))
        if asks and portion.done:
            yield portion._replace(done=())
            meant = [_id(one) for one in portion.done]
            confirm(f"{verb.capitalize()} {', '.join(meant)}?", yes=False)
            portion = ask(Asked(meant, why, dry_run=False))
        if portion.failed and not portion.done:
            raise error_for(next(iter(portion.failed.values())))
        yield portion
        return
    done: list[Any] = []
    matched = 0
    with progress(len(ids) or None, as_json=change.as_json) as show:
        for some in _cut(ids, size) if ids else [None]:
            planned = ask(Asked(some, why, dry_run=True, show=lambda count: show(count, f"{count:,} found")))
            if some is None:
                planned = planned._replace(failed={})  # filters leave out what the verb is not for
            done += planned.done
            matched += len(planned.done) + len(planned.failed) + len(planned.skipped)
            yield planned if change.dry_run else planned._replace(done=())
            show(matched, f"{matched:,} found")
    if change.dry_run or not done:
        return
    confirm(f"{verb.capitalize()} {len(done):,} of {counted(matched, thing)}?", yes=change.yes)
    with progress(len(done), as_json=change.as_json) as show:
        count = did = 0
        for some in _cut([_id(one) for one in done], size):
            try:
                portion = ask(Asked(some, why, dry_run=False))
            except BaseException:  # also Ctrl-C
                note(f"at least {did:,} of {counted(len(done), thing)} were done: repeat the command for the others")
                raise
            did += len(portion.done)
            yield portion
            show(count := count + len(some), f"{count:,} of {counted(len(done), thing)}")


def change_each(noun: AnyNoun, verb: str, ids: Sequence[str], change: Change, ask: Ask, *, things: str) -> None:
    """Do a verb of a noun's table, write what it was or would be done to, and why others failed; exit code 1 then."""
    table = noun.verbs[verb]
    done = failed = 0
    for portion in change_all(noun.name, verb, ids, change, ask, undoable=table.undoable):
        for id_, problem in portion.failed.items():
            note(problem.detail if id_ in problem.detail else f"{id_}: {problem.detail}")
        for one in portion.done:
            id_ = _id(one)
            as_said = {"id": id_, "done": None if change.dry_run else verb}
            json_line(as_said) if change.as_json else line(f"{id_} {'would be ' * change.dry_run}{table.done}")
        done, failed = done + len(portion.done), failed + len(portion.failed)
    if not (done or failed):
        note(f"no {things} match: nothing to do")
    if failed:
        raise SystemExit(Exit.FAILED)


def asking(
    noun: Noun[Any, Any, Any, Any, Any, F, Any],
    verb: str,
    matching: F,
    reach: Reach,
    *,
    mesh: str | None,
    find: Callable[[], Sequence[str]] | None = None,
) -> Ask:
    """Return a function that asks the broker for a verb of a noun's table: by ids, else on those `matching`.

    Where the broker's filter knows ids alone, `find` returns those of what the filters match.
    """

    def ask(asked: Asked) -> Portion:
        if asked.ids is None and find is not None:
            return Portion(find(), {})
        meant = matching if asked.ids is None else msgspec.convert({"ids": asked.ids}, type(matching))
        total = Portion([], {})

        async def work(client: BrokerClient) -> Portion:
            nonlocal total
            options: dict[str, Any] = {"mesh": mesh, "reason": asked.why, "dry_run": asked.dry_run}
            async for part in client.changes(noun, verb, meant, **options):
                failed = {failure.id: failure.problem for failure in part.failed}
                total = Portion([*total.done, *part.done], total.failed | failed, unread=part.unread)
                asked.show(len(total.done))
            return total

        return reach.broker.ask(work, timeout=SECONDS)

    return ask


def _id(thing: Any) -> str:
    return str(getattr(thing, "id", thing))


def _cut(ids: Sequence[str], size: int) -> list[Sequence[str]]:
    """Cut many ids into requests that each take moments: none runs into its time-out, and Ctrl-C ends between two."""
    return [ids[i : i + size] for i in range(0, len(ids), size)]
