"""`postroom worker …`: run the worker that publishes, see its backlog, publish again by hand.

What runs a user's code is a process of its own, `python -m postroom.worker`, which has nothing of ours but the library:
here `cli`, `daemon` and `worker` are ours; there they are the user's names. So the command line never imports a user's
module: every verb that needs one becomes that process, or asks one.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable
from functools import partial
from time import monotonic
from typing import Annotated, Any, Final, NamedTuple, NoReturn

import typer

from cli import completion
from cli.change import SECONDS, Asked, Change, Portion, change_each, check_choice
from cli.noun import Config, Json, Mesh, OlderThan, OutboxPlace, Since, Verbs, chosen_ids, noun, several
from cli.output import confirm, json_line, line, listing, note, progress, reason_or_ask
from postroom import BrokerClient
from postroom._wire import unpublished
from postroom._wire.administration import MeshQuery
from postroom._wire.nouns import Result
from postroom._wire.words import ago, counted, span, when
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.runtime import check_library_is_visible

Context = Annotated[
    str | None,
    typer.Option(
        "--context",
        "--mesh",
        help="Only of this mesh [default: all].",
        metavar="SLUG",
        autocompletion=completion.meshes,
    ),
]
Ids = Annotated[list[str] | None, several("Which, by id", completion.failing)]

# -P: the library is found before the working directory is looked at, which comes first for what the user names.
_COMMAND: Final = (sys.executable, "-P", "-m", "postroom.worker")
_SAID: Final = "postroom: "  # before the sentence with which it ends


class Filters(NamedTuple):
    """The conditions that refused messages match."""

    subject: Annotated[str | None, typer.Option(metavar="SUBJECT", help="Only with this subject.")] = None
    older_than: OlderThan = None


def failing(source: str) -> Verbs:
    """Return the verbs for what JetStream does not take of a source: `events`, `deliveries` or `replays`."""
    things = unpublished.UNPUBLISHED[source]
    app = noun(f"See {source} that JetStream refuses, and drop those that can never be published.")
    without = () if source == "events" else ("database",)  # an application's own outbox has no others

    def list_(*, context: Context = None, place: OutboxPlace, as_json: Json = False) -> None:
        """List what fails, oldest first, and how many wait behind each; never their payloads."""
        query = MeshQuery(mesh=context)
        found = place.ask(lambda client: client.list_things(things, query), lambda own: own.failing(context))
        listing(
            found.failing,
            ("ID", "SUBJECT", "AGGREGATE", "TRIES", "AGE", "BEHIND", "ERROR"),
            lambda one: (one.id, one.subject, one.aggregate, one.attempts, ago(one.occurred_at), one.behind, one.error),
            things=f"{source} are refused",
            as_json=as_json,
        )
        if found.more:
            note(f"these are the oldest; `postroom worker {source} drop --all --dry-run` shows the ids of all")

    def operate(
        verb: str, *, ids: Ids = None, filters: Filters, change: Change, mesh: Mesh = None, place: OutboxPlace
    ) -> None:
        chosen = chosen_ids(ids)
        check_choice(things.name, f"worker {source}", chosen, change, filtered=filters != Filters())

        def ask(asked: Asked) -> Portion:
            matching = {"subject": filters.subject, **(filters.older_than or {})}
            meant = unpublished.RefusedFilter(**(matching if asked.ids is None else {"ids": list(asked.ids)}))
            options: Any = {"mesh": None if chosen else mesh, "reason": asked.why, "dry_run": asked.dry_run}
            result = place.ask(
                lambda client: client.change(things, verb, meant, **options),
                lambda own: own.change(verb, meant, **options),
                timeout=SECONDS,
            )
            return Portion(result.done, {failure.id: failure.problem for failure in result.failed})

        change_each(things, verb, chosen, change, ask, things=source)

    def log(*, place: OutboxPlace, as_json: Json = False) -> None:
        """Show what operators dropped, and why."""
        listing(
            place.ask(lambda client: client.log(things), lambda own: own.dropped()).dropped,
            ("AT", "BY", "ID", "SUBJECT", "ERROR", "WHY"),
            lambda one: (one.dropped_at, one.dropped_by, one.id, one.subject, one.error, one.reason),
            things=f"{source} were dropped",
            as_json=as_json,
        )

    app.command("list", without=without)(list_)
    for verb, table in things.verbs.items():
        help_ = f"{table.effect[:-1]}; `log` shows who did it, and why."
        app.command(verb, help=help_, without=without)(partial(operate, verb))
    app.command(without=without)(log)
    return app


app = noun()
for _source in unpublished.UNPUBLISHED:
    app.add_typer(failing(_source), name=_source)

Stream = Annotated[str | None, typer.Option("--stream", help="Only what was published to this stream.", metavar="NAME")]
Flows = Annotated[
    list[str] | None,
    typer.Option("--flow", metavar="MODULE:FLOW", help="Also run this flow, as nightly_export:flow. Repeatable."),
]
Confirmed = Annotated[
    bool, typer.Option("--confirmed", help="Also what is known to be handled; those who handled it skip it.")
]


@app.command()
def run(*, config: Config = None, flow: Flows = None) -> None:
    """Publish, and run the jobs of flows, until a signal says stop.

    Any number of workers may run, beside the one of `postroom up` too: they share the work.
    """
    become_worker("run", *options(config=config, flow=flow))


@app.command()
def backlog(*, context: Context = None, place: OutboxPlace, as_json: Json = False) -> None:
    """Show what waits to be published, and since when."""
    query = MeshQuery(mesh=context)
    sources = unpublished.SOURCES
    listing(
        place.ask(lambda client: client.list_things(sources, query), lambda own: own.backlogs(context)).sources,
        ("source", "waiting", "oldest", "refused"),
        lambda one: (one.source, one.count, ago(one.oldest_at), one.failing),
        things="sources",
        as_json=as_json,
    )


@app.command(help=unpublished.SOURCES.verbs["redrive"].effect, without=("everything",))
def redrive(
    *, since: Since, stream: Stream = None, confirmed: Confirmed = False, place: OutboxPlace, change: Change
) -> None:
    """Count what it is first, then ask for it, and say how many messages of each source it was."""
    change = change._replace(reason=reason_or_ask(change.reason, dry_run=change.dry_run))
    meant = unpublished.PublishedFilter(**since, stream=stream, confirmed=confirmed)
    began = monotonic()

    counts = _publish_again(place, change._replace(dry_run=True), meant)
    if not change.dry_run and counts.total():
        begin = f"since {when(meant.since)}" if meant.since else f"in the last {span(meant.last_seconds or 0)}"
        confirm(f"Publish {counted(counts.total(), 'message')} published {begin} again?", yes=change.yes)
        if meant.last_seconds is not None:
            meant.last_seconds += monotonic() - began  # back to what was counted, however long the answer took
        counts = _publish_again(place, change, meant, counts.total())
    for source, messages in counts.items():
        if change.as_json:
            json_line(unpublished.Redriven(source, messages))
        else:
            line(f"{source}: {messages:,} {'would be ' * change.dry_run}{unpublished.SOURCES.verbs['redrive'].done}")


def _publish_again(
    place: OutboxPlace, change: Change, meant: unpublished.PublishedFilter, total: int | None = None
) -> Counter[str]:
    """Ask for it, or count it, and return how many messages of each source it was; `total` are known to match."""
    counts = Counter[str]()
    options: Any = {"reason": change.reason, "dry_run": change.dry_run}

    async def at_broker(client: BrokerClient) -> None:
        async for part in client.changes(unpublished.SOURCES, "redrive", meant, **options):
            count(part)
            show(counts.total(), counted(counts.total(), "message"))

    async def whole(answer: Awaitable[Result[unpublished.Redriven]]) -> None:
        count(await answer)

    def count(result: Result[unpublished.Redriven]) -> None:
        for one in result.done:
            counts[one.source] += one.messages

    try:
        with progress(total, as_json=change.as_json) as show:
            place.ask(at_broker, lambda own: whole(own.redrive(meant, **options)), timeout=SECONDS)
    except BaseException:  # also Ctrl-C
        if total is not None:
            of_all = f"at least {counts.total():,} of {counted(total, 'message')}"
            note(f"{of_all} are published again: repeat the command, which begins anew")
        raise
    return counts


def become_worker(*words: str) -> NoReturn:
    """Go on as that process, under this one's id: signals and a service manager reach it, its exit code is ours."""
    check_library_is_visible()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in range(3):
        os.set_inheritable(descriptor, True)  # also one opened in place of a closed stream
    os.execv(_COMMAND[0], [*_COMMAND, *words])  # noqa: S606 - our own words, no shell


def ask_worker(*words: str) -> Any:
    """Return what such a process answers; raises `Fatal` with its sentence and its exit code where it has none."""
    check_library_is_visible()
    done = subprocess.run(  # noqa: S603 - our own words, no shell
        [*_COMMAND, *words], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    how = f"exit code {done.returncode}" if done.returncode >= 0 else f"signal {-done.returncode}"
    silent = (
        f"{words[words.index('--') + 1]} ended the process that loaded it ({how}) and said nothing: fix that module"
    )
    *printed, last = done.stderr.splitlines() or [silent]
    if done.returncode == 0 and done.stdout:
        sys.stderr.write(done.stderr)
        return json.loads(done.stdout)
    sys.stderr.writelines(f"{line}\n" for line in printed)
    code = Exit(done.returncode) if done.returncode in set(Exit) - {Exit.OK} else Exit.FAILED
    raise Fatal(code, last.removeprefix(_SAID))


def options(**given: object) -> list[str]:
    """Write options as that process reads them, but for those that were not given; a list is one that is repeated."""
    words = []
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            words += [] if each is None else [f"--{name.replace('_', '-')}={each}"]
    return words
