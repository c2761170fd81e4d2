"""`postroom jobs …`: start, list, show, cancel and retry jobs (docs/contract/jobs.md#jobs-30)."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Final, TypeVar
from uuid import UUID, uuid4

import typer

from cli.job_rows import COLUMNS, STEPS, cells, described, drawn, folded, step_cells, step_name, told
from cli.noun import Database, Json, Mesh, Reason, Yes, noun
from cli.output import confirm, fields, json_line, line, note, reason_or_ask, table
from cli.selection import chosen_ids
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom.chassis.postgres import Connection
    from postroom.ledger.operating import JobTree

T = TypeVar("T")


def _uuid(text: str) -> UUID:
    """Read a UUID, as Typer asks a parser to."""
    try:
        return UUID(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a UUID") from None


app = noun("Start, inspect, retry and cancel jobs.")

JobId = Annotated[
    UUID, typer.Argument(parser=_uuid, metavar="JOB", help="The job's id (`postroom jobs list` shows them).")
]
Jobs = Annotated[
    list[str] | None, typer.Argument(metavar="[JOB]...", help="Jobs by id; `-` reads them from standard input.")
]
FlowFilter = Annotated[str | None, typer.Option("--flow", metavar="NAME", help="Only of this flow.")]
MeshFilter = Annotated[
    str | None, typer.Option("--mesh", envvar="POSTROOM_MESH", help="Only of this mesh [default: all].", metavar="SLUG")
]
State = Annotated[
    str | None,
    typer.Option(metavar="STATE", help="Only those that are running, closed, completed, failed or cancelled."),
]

_NUMBER: Final = re.compile(r"[0-9]+")  # a ledger is written so, right or wrong; no message's id is
_DONE: Final = {"retry": "continues", "cancel": "is cancelled"}
_KINDS: Final = {"activity": "an activity", "message": "a message, which an activity runs leg 2 for"}


@app.command()
def start(
    *,
    flow: Annotated[str, typer.Argument(metavar="MODULE:FLOW", help="The flow, as in nightly_export:flow.")],
    request: Annotated[
        str,
        typer.Option("--request", metavar="JSON", help="The request of its first activity; `-` reads standard input."),
    ] = "null",
    job: Annotated[
        UUID | None,
        typer.Option("--job", parser=_uuid, metavar="UUID", help="The job's id: a repeated start starts it once."),
    ] = None,
    traceparent: Annotated[
        str | None,
        typer.Option(envvar="TRACEPARENT", metavar="TRACE", help="The trace of the job (W3C Trace Context)."),
    ] = None,
    mesh: Mesh = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Start a job of a flow; a worker that runs the flow does the rest.

    \b
        postroom jobs start nightly_export:flow --request '{"day": "2026-01-31"}'
        postroom jobs start nightly_export:flow --job 6fa459ea-ee8a-3ca4-894e-db77e160355e --request - < request.json
    """  # noqa: D301 - \b: as it stands
    from cli.worker_process import ask_worker  # noqa: PLC0415
    from postroom.ledger.operating import start as begin  # noqa: PLC0415
    from postroom.ledger.primitives import Start  # noqa: PLC0415

    if mesh is None:
        raise Fatal(Exit.USAGE, "name the mesh with --mesh, or set POSTROOM_MESH")
    text = _request(request)
    found = ask_worker("describe", "flow", "--", flow)
    name, first, threshold = found["name"], found["first"], found["threshold"]
    _check_traceparent(traceparent)
    wanted = Start(job or uuid4(), mesh, name, uuid4(), first, text, threshold, traceparent)
    started = _with_database(database, lambda connection: begin(connection, wanted))
    if as_json:
        json_line({"id": wanted.job, "mesh": mesh, "flow": name, "started": started})
        return
    note(f"started a job of {name}" if started else "that job was started before: nothing was done")
    line(str(wanted.job))


@app.command("list")
def list_(
    *,
    state: State = None,
    flow: FlowFilter = None,
    mesh: MeshFilter = None,
    limit: Annotated[int, typer.Option(min=1, help="How many jobs to show.")] = 50,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """List jobs, newest first.

    \b
        postroom jobs list --state failed
        postroom jobs list --flow nightly-export --limit 5 --json
    """  # noqa: D301 - \b: as it stands
    from postroom.ledger.operating import JobFilter, find_jobs  # noqa: PLC0415

    _check_state(state)
    wanted = JobFilter(mesh=mesh, flow=flow, state=state)
    found = _with_database(database, lambda connection: find_jobs(connection, wanted, limit + 1))
    if as_json:
        for each in found[:limit]:
            json_line(each)
    else:
        table(COLUMNS, map(cells, found[:limit])) if found else line("no jobs")
    if len(found) > limit:
        note(f"There are more jobs: --limit {2 * limit}")


@app.command()
def show(*, job: JobId, database: Database = None, as_json: Json = False) -> None:
    """Show a job with its tree: each step's state, tries, ledger, age and request, and what operators did to it."""
    found = _find(database, job)
    if as_json:
        json_line(found)
        return
    fields(described(found.job))
    line("")
    table(STEPS, (step_cells(lead, activity) for lead, activity in drawn(found)))
    if found.log:
        line("")
        table(("AT", "VERB", "BY", "REASON"), ((act.at, act.verb, act.actor, act.reason) for act in found.log))


@app.command()
def tree(*, job: JobId, database: Database = None, as_json: Json = False) -> None:
    """Draw the tree of a job: each step and its state; equal neighbours without children are one line."""
    found = _find(database, job)
    if as_json:
        for _, activity in drawn(found):
            json_line(activity)
        return
    for lead, activity, count in folded(found):
        line(f"{lead}{step_name(activity)}  {activity.state}" + (f"  ({count} of them)" if count > 1 else ""))


@app.command()
def retry(
    *, jobs: Jobs = None, reason: Reason = None, yes: Yes = False, database: Database = None, as_json: Json = False
) -> None:
    """Continue failed jobs where they stopped: what is done stays done, and the rest is sent again.

    \b
        postroom jobs retry 6fa459ea-ee8a-3ca4-894e-db77e160355e --reason "the disk has room again"
        postroom jobs list --state failed --json | postroom jobs retry - --reason fixed --yes
    """  # noqa: D301 - \b: as it stands
    from postroom.ledger.retrying import retry_job  # noqa: PLC0415

    _operate("retry", retry_job, jobs, reason, database, yes=yes, as_json=as_json)


@app.command()
def cancel(
    *, jobs: Jobs = None, reason: Reason = None, yes: Yes = False, database: Database = None, as_json: Json = False
) -> None:
    """End jobs permanently, in any state: no step of them commits any more, and later messages are ignored.

    \b
        postroom jobs cancel 6fa459ea-ee8a-3ca4-894e-db77e160355e --reason "the wrong day"
    """  # noqa: D301 - \b: as it stands
    from postroom.ledger.operating import cancel_job  # noqa: PLC0415

    _operate("cancel", cancel_job, jobs, reason, database, yes=yes, as_json=as_json)


@app.command()
def explain(
    *,
    what: Annotated[
        str,
        typer.Argument(
            metavar="LEDGER|ID",
            help="15 digits as in `postroom jobs show`, or the id of a message or an activity.",
        ),
    ],
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Explain every digit of a ledger (without a database), or what a message was for and what is done of it.

    \b
        postroom jobs explain 001110000000001
        postroom jobs explain 01a1fc82-ab5c-0689-9154-33ba9c88d7e4
    """  # noqa: D301 - \b: as it stands
    if _NUMBER.fullmatch(what):
        _explain_ledger(what, as_json=as_json)
    else:
        _explain_message(database, what, as_json=as_json)


def _explain_ledger(ledger: str, *, as_json: bool) -> None:
    from postroom.ledger.digits import explain as read  # noqa: PLC0415
    from postroom.ledger.digits import kind_of  # noqa: PLC0415

    meanings = read(ledger)
    if as_json:
        digits = [meaning._asdict() for meaning in meanings]
        json_line({"ledger": ledger, "of": kind_of(ledger), "digits": digits})
        return
    line(f"{ledger} is the ledger of {_KINDS[kind_of(ledger)]}")
    line("")
    table(("POSITION", "DIGITS", "MEANING"), meanings)


def _explain_message(database: str | None, message: str, *, as_json: bool) -> None:
    from postroom.ledger.digits import explain as read  # noqa: PLC0415
    from postroom.ledger.messages import find_message  # noqa: PLC0415

    for number, found in enumerate(_with_database(database, lambda connection: find_message(connection, message))):
        if as_json:
            json_line(found)
            continue
        if number:
            line("")
        fields(told(found))
        if found.ledger is not None:
            line("")
            table(("POSITION", "DIGITS", "MEANING"), read(found.ledger))


def _operate(
    verb: str,
    act: Callable[..., Awaitable[None]],
    ids: list[str] | None,
    reason: str | None,
    database: str | None,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Do `act` to each job that is meant, after a question; exit code 1 where it failed for some of several."""
    chosen = [_uuid(each) for each in chosen_ids(ids)]
    if not chosen:
        raise Fatal(Exit.USAGE, "name a job by its id (`postroom jobs list` shows them)")
    why = reason_or_ask(reason)
    confirm(f"{verb.capitalize()} {chosen[0] if len(chosen) == 1 else f'{len(chosen)} jobs'}?", yes=yes)

    async def work(connection: Connection) -> int:
        from postroom import PostroomError  # noqa: PLC0415
        from postroom.chassis.postgres import acting  # noqa: PLC0415

        failed = 0
        for job in chosen:
            try:
                await act(connection, job, actor=acting(connection), reason=why)
            except PostroomError as error:
                if len(chosen) == 1:
                    raise
                failed += 1
                note(str(error))
                continue
            json_line({"id": job, "done": verb}) if as_json else line(f"{job} {_DONE[verb]}")
        return failed

    if _with_database(database, work):
        raise SystemExit(Exit.FAILED)


def _find(database: str | None, job: UUID) -> JobTree:
    from postroom.ledger.operating import show_job  # noqa: PLC0415

    return _with_database(database, lambda connection: show_job(connection, job))


def _with_database(url: str | None, work: Callable[[Connection], Awaitable[T]]) -> T:
    """Run `work` with a connection to the database of jobs, whose tables are this program's."""
    from postroom.chassis.postgres import check_version, connected  # noqa: PLC0415
    from postroom.ledger.database import ROOMS  # noqa: PLC0415

    if url is None:
        raise Fatal(Exit.USAGE, "no database is configured: set POSTROOM_DATABASE_URL, or --database")

    async def run() -> T:
        async with connected(url) as connection:
            await check_version(connection, *ROOMS, migrate_with="postroom broker migrate")
            return await work(connection)

    return asyncio.run(run())


def _request(text: str) -> str:
    """Return the request as JSON text; `-` reads it from standard input."""
    import msgspec  # noqa: PLC0415

    given = sys.stdin.buffer.read() if text == "-" else text.encode()
    try:
        return msgspec.json.encode(msgspec.json.decode(given)).decode()
    except msgspec.DecodeError as error:
        raise typer.BadParameter(f"the request is not JSON: {error}", param_hint="--request") from error


def _check_traceparent(text: str | None) -> None:
    from postroom._wire.message import TRACEPARENT  # noqa: PLC0415

    if text is not None and TRACEPARENT.fullmatch(text) is None:
        detail = f"{text!r} is not 00-<32 hex digits>-<16 hex digits>-01 (W3C Trace Context)"
        raise typer.BadParameter(detail, param_hint="--traceparent")


def _check_state(state: str | None) -> None:
    from postroom.ledger.states import JOB_STATES  # noqa: PLC0415

    if state is not None and state not in JOB_STATES:
        raise typer.BadParameter(f"{state!r} is not a state: {', '.join(JOB_STATES)}", param_hint="--state")
