"""An installation, as far as it can be seen from here: what `up` started, the daemon, the broker and what reports.

`postroom status` shows it once, and `postroom top` again and again. Typer would take longer to import than a look
takes, so a plain line is read here (docs/contract/operate.md#operate-61).
"""

import asyncio
import os
import shlex
import socket
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from msgspec.structs import replace

from cli.connect import NOT_ASKED, TOKEN_FILES, read_token
from cli.message import plain_line
from cli.stack import Stack
from cli.stack.layout import Layout
from cli.stack.supervisor import supervisor_of
from embedded import EmbeddedServer, ProcessIdentity
from postroom import AsyncClient, BrokerClient, NotPermitted, PostroomError, TryAgain, Unavailable
from postroom._wire import programs as wire
from postroom._wire.administration import MeshQuery
from postroom._wire.dead_letters import DEAD_LETTERS
from postroom._wire.jobs import JOBS
from postroom._wire.transport import find_socket
from postroom._wire.unpublished import CONSUMERS, SOURCES, ConsumersQuery, Durable
from postroom._wire.words import counted
from postroom.chassis.exits import Exit, Fatal

T = TypeVar("T")

_ANSWER_SECONDS: Final = 4.0
_PROCESS_SECONDS: Final = 2.0  # that a process of `up` has to answer
_MINUTES: Final = 60  # of an hour
# of a daemon, what only its report says
_REPORTED_ALONE: Final = ("name", "pid", "started_at", "at", "clock_seconds", "disk_free", "totals")
_VALUES: Final = {"--state": "state", "--socket": "socket", "--url": "url", "--token-file": "token_file"}
_ENVIRONMENT: Final = {"state": ("POSTROOM_STATE",), "url": ("POSTROOM_BROKER_URL",), "token_file": TOKEN_FILES}
_OF_ANOTHER: Final = ("POSTROOM_SOCKET", "POSTROOM_BROKER_URL", *TOKEN_FILES)


class Place(NamedTuple):
    """Where to look: the directory of an `up`, a daemon's socket, a broker with a token; None for what is found."""

    state: Path | None = None
    socket: Path | None = None
    url: str | None = None
    token_file: Path | None = None


def parse_status(arguments: list[str], environ: Mapping[str, str] = os.environ) -> tuple[Place, bool] | None:
    """Read `status` with its options: where to look, and whether as JSON; None for any other line."""
    if (found := plain_line("status", _VALUES, arguments, environ)) is None or found[0]:
        return None
    _, given = found
    for name, variables in _ENVIRONMENT.items():
        if text := next((environ[each] for each in variables if environ.get(each)), None):
            given.setdefault(name, text if name == "url" else Path(text))
    as_json = given.pop("as_json", False)
    return Place(**given), as_json


@dataclass
class Sight:
    """What was seen: processes of `up`, programs, consumers, what is wrong, and what could not be asked and why.

    `minutes` are those of the last hour, where they were asked for; consumers have their past then. With `cut_off` the
    broker has no Postgres to write to: what it still knows is shown, and that reports do not come is no news. `logs`
    has the log file of each process that `up` started, by its pid and its address (a daemon's first report may be yet
    to come): the journal does not have their output.
    """

    processes: list[dict[str, Any]] = field(default_factory=list)
    programs: list[wire.Program] = field(default_factory=list)
    consumers: list[Durable] = field(default_factory=list)
    minutes: list[wire.Minute] = field(default_factory=list)
    letters: dict[str, int] = field(default_factory=dict)
    troubles: list[wire.Trouble] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    cut_off: bool = False
    logs: dict[int | str | None, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> Exit:
        """0 where all is well, 69 where something does not run or cannot be asked, else 1."""
        if not self.troubles:
            return Exit.OK
        return Exit.UNAVAILABLE if any(trouble.level == "down" for trouble in self.troubles) else Exit.FAILED

    def troubles_of(self, program: wire.Program) -> Iterator[wire.Trouble]:
        """Yield what is wrong with a program, with the log that there is of it."""
        here = program.host == socket.gethostname()
        log = self.logs.get(program.pid, self.logs.get(program.address or "")) if here else None
        for trouble in program.troubles():
            yield replace(trouble, help=f"tail {log}") if log and trouble.help == program.journal else trouble

    async def ask(self, asked: Awaitable[T], what: str) -> T | None:
        """Wait for an answer; if it is refused to this caller, or fails, note so and return None."""
        try:
            return await asked
        except NotPermitted:
            self.unseen.append(f"{what}: only the administrator may see that (POSTROOM_ADMIN_TOKEN_FILE)")
        except PostroomError as error:
            if not self.cut_off:
                self.troubles.append(wire.Trouble(what, str(error), "postroom doctor", "down"))
        return None


async def look(place: Place, *, hour: bool = False) -> Sight:
    """Look at everything that is there, with `hour` also at the last hour; raises `Fatal` (3) where nothing is."""
    sight = Sight()
    place = await _look_at_up(place, sight)
    daemon, _ = await asyncio.gather(_ask_daemon(place, sight), _look_at_broker(place, sight, hour=hour))
    if daemon is not None:
        sight.programs = _with_daemon(sight.programs, daemon)
    heard = [one for one in sight.programs if not (one.away and sight.cut_off)]
    sight.troubles = wire.worst_first(chain(sight.troubles, *map(sight.troubles_of, heard)))
    return sight


def _own(place: Place) -> tuple[Place, bool]:
    """Return the place without what the environment says of another, and whether an option names the directory."""
    if place.state is None or str(place.state) == os.environ.get("POSTROOM_STATE"):
        return place, False
    others = {os.environ.get(name) for name in _OF_ANOTHER}
    return place._replace(**{name: None for name, value in place._asdict().items() if str(value) in others}), True


async def _look_at_up(place: Place, sight: Sight) -> Place:
    """Look at what `up` started, where it was named, runs, or nothing else is there; return where else to look."""
    place, named = _own(place)
    layout = Layout.of(place.state)
    elsewhere = place.url is not None or place.socket is not None or _find_socket() is not None
    try:
        layout.check()
    except Fatal as fatal:
        if place.state is not None:
            raise
        if not elsewhere:
            nothing = "nothing is in sight: no daemon's socket, no broker (set POSTROOM_BROKER_URL), and"
            raise Fatal(fatal.exit_code, f"{nothing} {fatal}") from fatal
        return place
    supervisor = supervisor_of(layout)
    if place.state is None and supervisor is None and elsewhere:
        return place
    stack = Stack(layout.state)
    sight.processes = await _processes(stack, supervisor)
    logs = {program.name: shlex.quote(str(program.log_file)) for program in stack.programs}
    sight.logs = {row.get(by): logs[row["process"]] for row in sight.processes[1:] for by in ("pid", "address")}
    for row in sight.processes:
        if row["state"] != "running":
            if supervisor is None:
                help_ = f"postroom up --detach --state {shlex.quote(str(layout.state))}"
            elif row["state"] == "stopped":  # which a doctor, who asks what runs, may not see
                help_ = f"tail {logs[row['process']]}"
            else:
                help_ = "postroom doctor"
            what = f"{row['state']}: {row['problem']}" if "problem" in row else row["state"]
            sight.troubles.append(wire.Trouble(row["process"], what, help_, "down"))
    if supervisor is None:
        return place._replace(socket=place.socket or layout.socket) if named else place
    return Place(
        layout.state,
        place.socket or (None if os.environ.get("POSTROOM_SOCKET") and not named else layout.socket),
        place.url or stack.broker.url,
        place.token_file or layout.admin_token_file,
    )


async def _processes(stack: Stack, supervisor: ProcessIdentity | None) -> list[dict[str, Any]]:
    """Return a row for the supervisor and for each process, with its backlog; what is not `running` is not well."""
    rows = [_row("up", supervisor, str(stack.layout.state))]
    rows += await asyncio.gather(*(_program(stack, program) for program in stack.programs))
    if rows[0]["state"] == "running":
        for row in rows[1:]:
            if row["state"] == "stopped":
                row["problem"] = "it ended, and is started again"
    return rows


def _row(name: str, process: ProcessIdentity | None, address: str) -> dict[str, Any]:
    if process is None:
        return {"process": name, "state": "stopped"}
    return {"process": name, "state": "running", "pid": process.pid, "address": address}


async def _program(stack: Stack, program: EmbeddedServer) -> dict[str, Any]:
    row = _row(program.name, program.process, program.address)
    through_broker = {stack.nats: _dead_letters, stack.postgres: _jobs}
    asking = {stack.daemon: _rows, stack.worker: _unpublished, stack.broker: _health, **through_broker}
    if row["state"] == "running" and program in asking:
        row |= await _answer(asking[program](stack), of_the_broker=program in through_broker)
    return row


async def _answer(asked: Awaitable[dict[str, Any]], *, of_the_broker: bool = False) -> dict[str, Any]:
    """Wait for what to show; what to say instead where there is no answer in time, or an error for one.

    That a broker does not answer is said in its own row, and says nothing of the servers that it was asked about.
    """
    try:
        return await asyncio.wait_for(asked, _PROCESS_SECONDS)
    except (TimeoutError, Unavailable, TryAgain) as error:
        if of_the_broker:
            return {}
        return {"state": "silent"} if isinstance(error, TimeoutError) else {"state": "failing", "problem": str(error)}
    except PostroomError as error:
        return {"state": "failing", "problem": str(error)}


async def _rows(stack: Stack) -> dict[str, Any]:
    async with stack.daemon.client() as client:
        health = await client.health()
    backlog = {status: health.rows.get(status, 0) for status in ("pending", "inflight", "dead")}
    if not health.missing:
        return {"backlog": backlog}
    what = "the broker's database lost messages: see `postroom outbox resend --missing --dry-run`"
    return {"backlog": {**backlog, "missing at the broker": health.missing}, "problem": what}


async def _health(stack: Stack) -> dict[str, Any]:
    """Ask the broker how it is; it keeps no backlog."""
    async with stack.broker.client() as client:
        reasons = (await client.health()).reasons
    return {"problem": "; ".join(reasons)} if reasons else {}


async def _unpublished(stack: Stack) -> dict[str, Any]:
    return {"backlog": {f"unpublished {source}": count for source, count in (await stack.worker.backlog()).items()}}


async def _jobs(stack: Stack) -> dict[str, Any]:
    async with stack.broker.client() as client:
        counts = await client.counts(JOBS)
    return {
        "backlog": {
            "running jobs": counts.running,
            "failed jobs": counts.failed,
            "steps that no worker knows": counts.unknown,
        }
    }


async def _dead_letters(stack: Stack) -> dict[str, Any]:
    async with stack.broker.client() as client:
        counts = await client.counts(DEAD_LETTERS)
    row = {"backlog": {f"dead in {stream}": count for stream, count in counts.letters.items()}}
    return row if counts.unread is None else {**row, "state": "failing", "problem": counts.unread.detail}


def _find_socket() -> Path | None:
    """Return the socket that the environment names, or the only one; None where there are none, or several."""
    try:
        return find_socket()
    except Unavailable:
        return None


async def _ask_daemon(place: Place, sight: Sight) -> wire.Program | None:
    """Ask the daemon of this machine, whose word is newer than its last report."""
    path = place.socket or _find_socket()
    if path is None:
        sight.unseen.append("there is no daemon's socket on this machine, or several: set POSTROOM_SOCKET")
        return None
    path, now = path.absolute(), datetime.now(UTC)
    async with AsyncClient(path, patience=0, timeout=_ANSWER_SECONDS) as client:
        thing = f"the daemon at {path}"
        version = await sight.ask(client.version(), thing)
        health = None if version is None else await sight.ask(client.health(), thing)
    if version is None or health is None:
        return None
    return wire.Program(
        kind="daemon",
        name="here",
        mesh=version.mesh,
        host=socket.gethostname(),
        pid=0,
        version=version.version,
        started_at=now,
        at=now,
        reported_at=now,
        clock_seconds=0.0,
        address=str(path),
        status=health.status,
        reasons=health.reasons,
        waiting=health.rows["pending"] + health.rows["inflight"],
        dead=health.rows["dead"],
        oldest_at=health.oldest_pending_at,
        relay=health.relay.state,
    )


def _with_daemon(programs: list[wire.Program], daemon: wire.Program) -> list[wire.Program]:
    """Return the programs with a daemon's own answer, in the place of its last report if it has sent one."""
    place = daemon.host, daemon.address, daemon.mesh
    for number, one in enumerate(programs):
        if (one.host, one.address, one.mesh) == place:
            known = {name: getattr(one, name) for name in _REPORTED_ALONE}
            return [*programs[:number], replace(daemon, **known), *programs[number + 1 :]]
    return [*programs, daemon]


async def _look_at_broker(place: Place, sight: Sight, *, hour: bool) -> None:
    """Ask the broker, if one is configured, for its own state and what programs reported to it."""
    if place.url is None:
        sight.unseen.append(NOT_ASKED)
        return
    thing = "the broker"  # what fails names its address, once that is known to hold no password
    try:
        token = read_token(place.token_file)
    except Fatal as fatal:
        sight.troubles.append(wire.Trouble(thing, str(fatal), "export POSTROOM_ADMIN_TOKEN_FILE=FILE", "down"))
        return
    async with BrokerClient(place.url, token, patience=0, timeout=_ANSWER_SECONDS) as client:
        health = await sight.ask(client.health(), thing)
        if health is None:
            return
        if health.status == "unavailable":
            sight.troubles += [wire.Trouble(thing, one, "postroom doctor", "down") for one in health.reasons]
            sight.cut_off = True
        page, consumers, sources, letters, jobs = await asyncio.gather(
            sight.ask(client.list_things(wire.PROGRAMS, wire.ProgramsQuery()), "programs"),
            sight.ask(client.list_things(CONSUMERS, ConsumersQuery(last=_MINUTES if hour else 0)), "consumers"),
            sight.ask(client.list_things(SOURCES, MeshQuery()), "what waits to be published"),
            sight.ask(client.counts(DEAD_LETTERS), "dead letters"),
            sight.ask(client.counts(JOBS), "jobs"),
        )
        if hour and consumers is not None:  # a caller who may see them may see this too
            minutes = await sight.ask(
                client.list_things(wire.MINUTES, wire.MinutesQuery(last=_MINUTES)), "the last hour"
            )
            sight.minutes = [] if minutes is None else minutes.minutes
    sight.programs += [] if page is None else page.programs
    if consumers is not None:
        sight.consumers = consumers.consumers
        sight.unseen += [] if consumers.unread is None else [consumers.unread.detail]
        sight.troubles += wire.troubles_of(consumers.consumers)
    if sources is not None and page is not None:
        sight.troubles += wire.troubles_of(sources.sources)
        sight.troubles += _of_workers(sight.programs, sum(one.count for one in sources.sources))
    if letters is not None:
        sight.letters = letters.letters
        sight.troubles += letters.troubles()
    if jobs is not None:
        sight.troubles += jobs.troubles()
        sight.troubles += [] if page is None else jobs.unattended(page.programs)


def _of_workers(programs: list[wire.Program], waiting: int) -> Iterator[wire.Trouble]:
    if not any(one.kind == "worker" for one in programs):  # which would publish the messages that wait
        lack = f"no worker reports, and {counted(waiting, 'message')} to be published"
        yield wire.Trouble("publishing", lack, "postroom worker run --help", "wrong" if waiting else "look")
