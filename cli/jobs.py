"""`postroom jobs …`: start, list, show, cancel and retry jobs (docs/contract/jobs.md#jobs-30)."""

import re
import sys
from functools import partial
from typing import Annotated, Any, Final, NamedTuple, get_args
from uuid import UUID, uuid4

import msgspec
import typer

from cli import completion
from cli.change import Change, asking, change_each, check_choice
from cli.connect import advised
from cli.noun import BrokerPlace, Json, OlderThan, Reach, choice, chosen_ids, noun, several
from cli.output import draw, fields, json_line, line, listing, note, one_by_one, table
from postroom import BrokerClient
from postroom._wire.digits import explain as read
from postroom._wire.digits import kind_of
from postroom._wire.jobs import JOBS, Activity, Job, JobFilter, JobMessage, JobsQuery, JobState, StartJob
from postroom._wire.message import TRACEPARENT
from postroom._wire.nouns import CHANGES
from postroom._wire.words import ago, json_fault
from postroom.chassis.exits import Exit, Fatal
from postroom.errors import TryAgain, Unavailable


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a UUID") from None


app = noun()

JobId = Annotated[
    UUID,
    typer.Argument(
        parser=_uuid,
        metavar="JOB",
        help="The job's id (`postroom jobs list` shows them).",
        autocompletion=completion.jobs,
    ),
]
Jobs = Annotated[list[str] | None, several("Jobs by id", completion.jobs, "[JOB]...")]

_DIGITS: Final = ("POSITION", "DIGITS", "MEANING")
_NUMBER: Final = re.compile(r"[0-9]+")  # a ledger is written so, right or wrong; no message's id is
_KINDS: Final = {"activity": "an activity", "message": "a message, which an activity runs leg 2 for"}
_MEANINGS: Final = {"closed": "closed (every step is done, and the completion tasks are not)"}
_REQUEST_CHARACTERS: Final = 30  # of what a step was spawned with, in a table
_SAID_CHARACTERS: Final = 200  # of what a message says


class Filters(NamedTuple):
    """The conditions that jobs match."""

    state: Annotated[
        str | None,
        typer.Option(
            "--state",
            "--status",
            **choice("state", get_args(JobState)),
            metavar="STATE",
            help="Only those that are running, closed, completed, failed or cancelled.",
        ),
    ] = None
    flow: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only of this flow.", autocompletion=completion.flows)
    ] = None
    older_than: OlderThan = None

    def conditions(self) -> dict[str, Any]:
        """Return them as the members of a query or a filter."""
        return {"state": self.state, "flow": self.flow, **(self.older_than or {})}


@app.command()
def start(
    *,
    flow: Annotated[
        str, typer.Argument(metavar="MODULE:FLOW", help="The flow, as in nightly_export:flow; with --first, its name.")
    ],
    request: Annotated[
        str, typer.Option(metavar="JSON", help="The request of its first activity; `-` reads standard input.")
    ] = "null",
    job: Annotated[
        UUID | None, typer.Option(parser=_uuid, metavar="UUID", help="The job's id: a repeated start starts it once.")
    ] = None,
    first: Annotated[
        str | None, typer.Option(metavar="NAME", help="Its first activity: the flow's code need not be here then.")
    ] = None,
    threshold: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="With --first: the flow's threshold [default: 0].")
    ] = None,
    traceparent: Annotated[
        str | None,
        typer.Option(envvar="TRACEPARENT", metavar="TRACE", help="The trace of the job (W3C Trace Context)."),
    ] = None,
    reach: Reach,
    as_json: Json = False,
) -> None:
    """Start a job of a flow; a worker that runs the flow does the rest.

    \b
        postroom jobs start nightly_export:flow --request '{"day": "2026-01-31"}'
        postroom jobs start nightly_export:flow --job 6fa459ea-ee8a-3ca4-894e-db77e160355e --request - < request.json
        postroom jobs start nightly-export --first extract
    """  # noqa: D301 - \b: as it stands
    from cli.worker import ask_worker  # noqa: PLC0415

    given = sys.stdin.buffer.read() if request == "-" else request.encode()
    try:
        msgspec.json.decode(given)  # as the broker reads it, which also refuses a key that is given twice
    except msgspec.DecodeError as error:
        detail = f"the request is not JSON: {json_fault(error, given)}"
        raise typer.BadParameter(detail, param_hint="--request") from error
    except RecursionError as error:
        raise typer.BadParameter("the request is nested too deeply", param_hint="--request") from error
    if traceparent is not None and TRACEPARENT.fullmatch(traceparent) is None:
        detail = f"{traceparent!r} is not 00-<32 hex digits>-<16 hex digits>-01 (W3C Trace Context)"
        raise typer.BadParameter(detail, param_hint="--traceparent")
    names: dict[str, Any] = {"flow": flow, "first": first, "threshold": threshold or 0}
    if first is None:
        if threshold is not None:
            raise Fatal(Exit.USAGE, "--threshold needs --first: a flow that is imported says its own threshold")
        names = ask_worker("describe", "flow", "--", flow)
        names["flow"] = names.pop("name")

    id_ = job or uuid4()
    wanted = partial(StartJob, **names, id=id_, request=msgspec.Raw(given), traceparent=traceparent)
    try:
        started = reach.ask(lambda client, mesh: client.start_job(wanted(mesh=mesh)))
    except (TryAgain, Unavailable) as error:
        raise advised(error, f"then repeat it with --job {id_}, which does not start a second job") from error
    if as_json:
        json_line(started)
        return
    note(f"started a job of {started.flow}" if started.started else "that job was started before: nothing was done")
    line(str(started.id))


@app.command("list")
def list_(
    *,
    filters: Filters,
    limit: Annotated[int, typer.Option(min=1, help="How many jobs to show.")] = 50,
    reach: Reach,
    as_json: Json = False,
) -> None:
    """List jobs, newest first.

    \b
        postroom jobs list --state failed
        postroom jobs list --flow nightly-export --limit 5 --json
    """  # noqa: D301 - \b: as it stands

    async def work(client: BrokerClient) -> list[Job]:
        found: list[Job] = []
        wanted = JobsQuery(mesh=reach.mesh, **filters.conditions(), limit=min(limit + 1, CHANGES))
        while True:
            page = await client.list_things(JOBS, wanted)
            found += page.jobs
            if page.next_cursor is None or len(found) > limit:
                return found
            wanted = msgspec.structs.replace(wanted, cursor=page.next_cursor)

    def cells(job: Job) -> tuple[Any, ...]:
        age, ended = ago(job.started_at), ago(job.ended_at)
        return (job.id, job.mesh, job.flow, job.state, job.open, age, ended, job.error or _waits_for(job))

    found = reach.broker.ask(work)
    columns = ("JOB", "MESH", "FLOW", "STATE", "OPEN", "AGE", "ENDED", "ERROR")
    listing(found[:limit], columns, cells, things="jobs", as_json=as_json)
    if len(found) > limit:
        note(f"There are more jobs: --limit {2 * limit}")


@app.command()
def show(*, job: JobId, broker: BrokerPlace, as_json: Json = False) -> None:
    """Show a job with its tree: each step's state, tries, ledger, age and request, and what operators did to it."""
    found = broker.ask(lambda client: client.inspect(JOBS, str(job)))
    if as_json:
        json_line(found)
        return
    shown = found.job
    fields(
        [
            ("job", shown.id),
            ("mesh", shown.mesh),
            ("flow", shown.flow),
            ("state", _MEANINGS.get(shown.state, shown.state)),
            ("", _waits_for(shown)),
            ("open", shown.open),
            ("started", shown.started_at),
            ("ended", shown.ended_at),
            ("reason", shown.error),
        ]
    )
    line("")

    def cells(lead: str, step: Activity) -> tuple[Any, ...]:
        name, age = lead + _step_name(step), ago(step.spawned_at)
        request = _shortened(step.request, _REQUEST_CHARACTERS)
        return (name, step.state, step.attempts, step.deliveries, step.ledger, age, request, step.error)

    columns = ("STEP", "STATE", "TRIES", "DELIVERIES", "LEDGER", "AGE", "REQUEST", "ERROR")
    table(columns, (cells(lead, step) for lead, step, _ in draw(found.activities)))
    if found.log:
        line("")
        table(("AT", "VERB", "BY", "REASON"), ((act.at, act.verb, act.actor, act.reason) for act in found.log))


@app.command()
def tree(*, job: JobId, broker: BrokerPlace, as_json: Json = False) -> None:
    """Draw the tree of a job: each step and its state; equal neighbours without children are one line."""
    found = broker.ask(lambda client: client.inspect(JOBS, str(job))).activities
    if as_json:
        for _, activity, _ in draw(found):
            json_line(activity)
        return
    for lead, activity, count in draw(found, alike=lambda activity: (_step_name(activity), activity.state)):
        line(f"{lead}{_step_name(activity)}  {activity.state}" + (f"  ({count} of them)" if count > 1 else ""))


@app.command()
def explain(
    *,
    what: Annotated[
        str,
        typer.Argument(
            metavar="LEDGER|ID", help="15 digits as in `postroom jobs show`, or the id of a message or an activity."
        ),
    ],
    broker: BrokerPlace,
    as_json: Json = False,
) -> None:
    """Explain every digit of a ledger (without a broker), or what a message was for and what is done of it.

    \b
        postroom jobs explain 001110000000001
        postroom jobs explain 01a1fc82-ab5c-0689-9154-33ba9c88d7e4
    """  # noqa: D301 - \b: as it stands
    if _NUMBER.fullmatch(what):
        meanings = read(what)
        if as_json:
            json_line({"ledger": what, "of": kind_of(what), "digits": [meaning._asdict() for meaning in meanings]})
            return
        line(f"{what} is the ledger of {_KINDS[kind_of(what)]}")
        line("")
        table(_DIGITS, meanings)
        return
    one_by_one(broker.ask(lambda client: client.explain(what)), _show_message, as_json=as_json)


_EXAMPLES: Final = {
    "retry": """\b
    postroom jobs retry 6fa459ea-ee8a-3ca4-894e-db77e160355e --reason "the disk has room again"
    postroom jobs retry --all --state failed --flow nightly-export --reason fixed --yes""",
    "cancel": """\b
    postroom jobs cancel 6fa459ea-ee8a-3ca4-894e-db77e160355e --reason "the wrong day\"""",
}


def operate(verb: str, *, jobs: Jobs = None, filters: Filters, change: Change, reach: Reach) -> None:
    """Do `verb` to each chosen job; exit code 1 if it failed for some of several."""
    ids = chosen_ids(jobs)
    check_choice("job", "jobs", ids, change, filtered=filters != Filters())
    named = [str(_uuid(each)) for each in ids]
    ask = asking(JOBS, verb, JobFilter(**filters.conditions()), reach, mesh=None if ids else reach.mesh)
    change_each(JOBS, verb, named, change, ask, things="jobs")


for _verb, _table in JOBS.verbs.items():
    _help = f"{_table.effect}\n\n{_EXAMPLES.get(_verb, '')}"
    app.command(_verb, help=_help)(partial(operate, _verb))


def _show_message(found: JobMessage) -> None:
    fields(
        [
            ("id", found.id),
            ("is", found.sentence),
            ("activity", f"{found.activity} ({found.name})"),
            ("job", f"{found.job} ({found.job_state})"),
            ("mesh", found.mesh),
            ("flow", found.flow),
            ("deliveries", found.deliveries),
            ("ledger", found.ledger),
            ("says", _shortened(found.said, _SAID_CHARACTERS)),
            ("error", found.error),
        ]
    )
    if found.ledger is not None:
        line("")
        table(_DIGITS, read(found.ledger))


def _waits_for(job: Job) -> str | None:
    return f"waits for a worker that has {', '.join(job.unknown)}" if job.unknown else None


def _step_name(activity: Activity) -> str:
    """Name a step, and the cycle of its parent that spawned it, where that is not the first."""
    return f"{activity.name} (cycle {activity.cycle})" if activity.cycle else activity.name


def _shortened(json: msgspec.Raw, most: int) -> str | None:
    """Cut a request or an answer so that it stays a line; JSON's null is None."""
    said = bytes(json).decode()
    if said == "null":
        return None
    return said if len(said) <= most else said[: most - 1] + "…"
