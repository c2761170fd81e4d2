"""What is done with jobs as a whole: start, list, show, cancel and retry (docs/contract/jobs.md#jobs-30), and removal.

And what the ledgers know of one message, whose id an operator found in a log.

The state in which an activity is shown follows from its ledger (`state_of`; docs/jobs.md draws the states).

A verb that ends a job, or lets it go on, waits for the steps that are being committed, and holds up all others until it
is done: after `cancel_job` has returned, no step of the job commits.

Jobs that ended permanently are removed after a time, with activities, ledgers and operators' log (`JobRetention`).
Their ids stay taken, so that a scheduler that starts an old job again gets the answer that it was started before. A
message for a removed activity is acknowledged, as for any that does not exist.
"""

import asyncio
import time
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final, NamedTuple
from uuid import UUID

import asyncpg
import msgspec
import structlog

from postroom._wire import digits
from postroom._wire.jobs import Activity, Job, JobCounts, JobFilter, JobMessage, JobNote, JobTree
from postroom._wire.names import MESH
from postroom._wire.sql import load_queries, why_failed
from postroom._wire.words import when
from postroom.chassis.clock import DatabaseClock
from postroom.chassis.postgres import POSTGRES_ERRORS, Connection, Pool, count_changed, rest_since, uuid_of
from postroom.errors import Conflict, InvalidMessage, NotFound
from postroom.flow import Flow
from postroom.ledger.errors import Duplicate, Overflow
from postroom.ledger.primitives import Start, start_job

_log = structlog.get_logger(__name__)

QUERIES: Final = load_queries("postroom.ledger", "operations.sql")
_RETENTION: Final = load_queries("postroom.ledger", "retention.sql")
ENDED: Final = ("completed", "failed", "cancelled")  # states of a job
_NOT_FAILED: Final = {
    "running": "it is running: there is nothing to retry",
    "closed": "every step is done, and its completion tasks are running",
    "completed": "it is completed: start a new job",
    "cancelled": "it was cancelled permanently: start a new job",
}

_SLICES: Final = {
    name: _RETENTION[name].format(old=_RETENTION["old"])
    for name in ("remove_messages", "remove_requests", "remove_activities", "remove_jobs")
}
_JOBS: Final = 100  # that one slice reads
_ROWS: Final = 1000  # that one slice removes
_SWEEP_SECONDS: Final = 3600.0  # between two sweeps


async def start(connection: Connection, job: Start) -> bool:
    """Begin a job; returns False where the same job was begun before, even if it was removed since.

    Raises `Conflict` where the id belongs to another job, or to one with another request, `InvalidFlow` where there can
    be no flow of that name, and `InvalidMessage` where the name of the mesh is not valid, or Postgres cannot store the
    request.
    """
    mesh = job.context
    Flow(job.flow, threshold=job.threshold)  # which refuses the names that no worker runs
    try:
        await start_job(connection, job)
    except asyncpg.CheckViolationError as error:
        detail = f"there is no mesh {mesh!r}: a mesh's name is {MESH.words}"
        raise InvalidMessage.of("invalid_name", detail, field="mesh") from error
    except (asyncpg.DataError, asyncpg.ProgramLimitExceededError) as error:
        why = str(error.detail or error).partition("\n")[0].rstrip(".")  # a hint follows on lines of its own
        detail = f"Postgres cannot store the request ({why}): pass another"
        raise InvalidMessage.of("invalid_request", detail) from error
    except Duplicate:
        found = await connection.fetchrow(QUERIES["find_start"], job.job, job.request)
        removed = await connection.fetchrow(QUERIES["find_removed"], job.job)
        known = found is not None and tuple(found) == (mesh, job.flow, job.name, True)
        if not known and (removed is None or tuple(removed) != (mesh, job.flow)):
            whose = f"the id {job.job} belongs to a job with another flow or request"
            detail = f"{whose}: use another id, or the same flow and request"
            raise Conflict.of("job_taken", detail) from None
        return False
    return True


async def find_jobs(
    connection: Connection,
    wanted: JobFilter,
    limit: int,
    *,
    mesh: str | None = None,
    after: tuple[datetime, UUID] | None = None,
) -> list[Job]:
    """Return the newest `limit` jobs that are wanted, of one mesh or all, newest first, after a given one."""
    bounds = mesh, wanted.flow, wanted.state, limit, *(after or (None, None)), wanted.ids
    age = wanted.older_than_seconds, wanted.before
    rows = await connection.fetch(QUERIES["find_jobs"], *bounds, *age)
    return [Job(**dict(row)) for row in rows]


async def count_jobs(connection: Connection) -> JobCounts:
    """Return the counts of jobs of all meshes that an operator asks for first."""
    row = await connection.fetchrow(QUERIES["count_jobs"])
    assert row is not None  # noqa: S101 - it counts
    flows: dict[str, int] = msgspec.json.decode(row["flows"])
    return JobCounts(running=sum(flows.values()), failed=row["failed"], unknown=row["unknown"], flows=flows)


async def show_job(connection: Connection, job: UUID) -> JobTree:
    """Return a job with its tree as they are at one moment; raises `NotFound`."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        row = await connection.fetchrow(QUERIES["find_job"], job)
        if row is None:
            raise missing(job)
        activities = await connection.fetch(QUERIES["find_activities"], job)
        log = await connection.fetch(QUERIES["find_log"], job)
    steps = [_activity(each, row["state"]) for each in activities]
    return JobTree(
        job=Job(**dict(row), unknown=sorted({step.name for step in steps if step.state == "unknown"})),
        activities=steps,
        log=[JobNote(**dict(each)) for each in log],
    )


async def hold(connection: Connection, job: UUID) -> None:
    """Hold every activity of a job, also those that are spawned while this waits for the others."""
    held = -1
    while (count := await connection.fetchval(QUERIES["hold_activities"], job)) != held:
        held = count


async def cancel_job(connection: Connection, job: UUID, *, actor: str, reason: str) -> None:
    """End a job that runs or has failed, permanently, and emit `job_cancelled`; what comes later is `Inactive`.

    It waits for a step that is being committed; none commits afterwards. Raises `NotFound`, and `Conflict` where the
    job is completed or cancelled.
    """
    async with connection.transaction():
        await hold(connection, job)
        row = await connection.fetchrow(QUERIES["cancel"], job, actor, reason)
        if row is None:
            raise missing(job)
        if not row["done"]:
            raise refusal("cancel", job, row["state"])


async def retry_job(connection: Connection, job: UUID, *, actor: str, reason: str) -> None:
    """Let a failed job go on where it stopped, and emit `job_retried`.

    The ledgers stay as they are: what is done by them is not done again. The rest goes out again, through the event
    outbox, together with the job's new state: the `activity_spawned` of what has not begun, and an `activity_retried`
    for a message that leg 2 has not done, with its id and content. So do messages that came while the job was failed,
    which were acknowledged and kept (`enter_leg2`).

    Raises `NotFound`, and `Conflict` where the job has not failed, its activity has no attempt left, or its request
    can't go out again because the outbox has deleted it.
    """
    async with connection.transaction():
        await hold(connection, job)
        await foresee_retry(connection, job)
        row = await connection.fetchrow(QUERIES["retry"], job, actor, reason)
        if row is None:
            raise missing(job)
        if not row["done"]:
            raise refusal("retry", job, row["state"])


async def foresee_retry(connection: Connection, job: UUID) -> None:
    """Raise the `Conflict` that a retry of a failed job would end in now."""
    failed = await connection.fetchval(QUERIES["find_failed"], job)
    try:  # an attempt that the ledger has no room for would fail at once, again
        if failed is not None:
            enter_leg2(failed) if digits.is_set(failed, digits.LEG1_COMPLETE) else enter_leg1(failed)
    except Overflow as error:
        raise Conflict.of("job_exhausted", f"the job {job} cannot be retried: {error}; start a new job") from error
    pruned = await connection.fetchrow(QUERIES["find_pruned"], job)
    if pruned is not None:  # it would wait for the answer to a request that cannot be sent again
        lacks = f"{pruned['name']!r} has no answer to its request {pruned['id']}"
        detail = f"{lacks}, and the outbox has deleted that request by its age; start a new job"
        raise Conflict.of("request_pruned", f"the job {job} cannot be retried: {detail}")


def refusal(verb: str, job: UUID, state: str) -> Conflict:
    """Say why a verb cannot be done to a job in a state."""
    if verb == "retry":
        return Conflict.of("job_not_failed", f"the job {job} cannot be retried: {_NOT_FAILED[state]}")
    detail = f"the job {job} is {state}: it must be running, closed or failed to be cancelled"
    return Conflict.of("job_ended", detail)


EFFECTS: Final = MappingProxyType({"retry": retry_job, "cancel": cancel_job})
"""What each verb does to a job."""

FORESEEN: Final = MappingProxyType({"retry": foresee_retry})
"""What a dry run checks in addition to the state."""


async def find_message(connection: Connection, message: str) -> list[JobMessage]:
    """Return the role of a message for each activity that it concerned; raises `NotFound`.

    The id may also be an activity's, which the logs of workers name as well, and may have the ending of a message that
    was published again (`/1`) or replayed (`~consumer.1`).
    """
    known = message.partition("~")[0]
    head, slash, epoch = known.rpartition("/")
    if slash and epoch.isdecimal():
        known = head
    rows = await connection.fetch(QUERIES["find_message"], known, uuid_of(known))
    if not rows:
        raise unknown_message(message)
    return [
        JobMessage(
            id=known,
            what=row["what"],
            sentence=_sentence(row),
            mesh=row["context"],
            flow=row["flow"],
            job=row["job_id"],
            job_state=row["state"],
            activity=row["activity_id"],
            name=row["name"],
            ledger=None if row["ledger"] is None else digits.render(row["ledger"]),
            deliveries=row["times"] if row["what"] == "answer" else None,
            said=msgspec.Raw((row["said"] or "null").encode()),
            error=row["error"],
        )
        for row in rows
    ]


def _sentence(row: asyncpg.Record) -> str:
    match row["what"]:
        case "answer":
            return "leg 2 of the activity runs for it"
        case "set_aside":
            return f"the worker {row['by']} set it aside: it waits for one that has the activity {row['name']!r}"
        case "missed":
            return "it arrived while the job was failed: a retry of the job delivers it again"
        case "request":
            times = "once" if row["times"] == 1 else f"{row['times']} times"
            answer = f"answered by {row['by']}"
            if row["by"] is None:
                answer = "not answered" if row["at"] is None else f"not answered, due at {when(row['at'])}"
            return f"it is a request of the activity ({times}, {answer})"
        case "event":
            published = "not published yet" if row["at"] is None else f"published at {when(row['at'])}"
            return f"it is a transition of the activity ({row['by']}, {published})"
        case _:
            return "it is an activity, not a message"


def unknown_message(message: str) -> NotFound:
    """Say that the ledgers do not know a message."""
    why = "no activity asked with it, and leg 2 of none was entered with it; `postroom jobs show` takes the id of a job"
    return NotFound.of("message_missing", f"the ledgers know no message and no activity {message!r}: {why}")


def _activity(row: asyncpg.Record, job_state: str) -> Activity:
    progress = Progress(
        row["ledger"],
        row["answers_due"],
        row["answers_taken"],
        row["undone"],
        closing=row["closing"],
        failed=row["failed_at"] is not None,
        unknown=row["worker_without"] is not None,
    )
    state, error = state_of(progress, job_state), row["error"]
    if state == "unknown":
        why = "the name is misspelt or was changed, or it runs an older version of the flow"
        lacks = f"the worker {row['worker_without']} has no activity {row['name']!r}: {why}"
        error = f"{lacks}; the step waits for a worker that has it"
    return Activity(
        id=row["id"],
        parent=row["parent_id"],
        name=row["name"],
        cycle=row["dimension"],
        request=msgspec.Raw(row["request"].encode()),
        state=state,
        attempts=digits.decode_activity(row["ledger"]).leg1_attempts,
        deliveries=row["deliveries"],
        ledger=digits.render(row["ledger"]),
        spawned_at=row["spawned_at"],
        error=error,
    )


def missing(job: UUID) -> NotFound:
    """Say that there is no such job."""
    return NotFound.of("job_missing", f"there is no job {job}: `postroom jobs list` shows them")


class Progress(NamedTuple):
    """How far an activity is: its ledger, the answers due and taken, and which of its messages are under way."""

    ledger: int
    answers_due: int = 1
    answers_taken: int = 0
    undone: int = 0  # messages that were entered, and whose step 2 is not done
    closing: bool = False  # one of them closed the job, and its completion tasks are not done
    failed: bool = False
    unknown: bool = False  # a message of it was set aside, by a worker that does not have it


def state_of(progress: Progress, job_state: str) -> str:
    """Name the state of an activity of a job that is in `job_state`.

    An activity that is not done when its job ends is `stopped`; the one that failed is `failed`. One that waits for a
    worker that has it is `unknown`.
    """
    if progress.failed:
        return "failed"
    read = digits.decode_activity(progress.ledger)
    if not read.leg1_complete:
        state = "asking" if read.leg1_attempts else "waiting"
    elif progress.closing:
        state = "completing"
    elif progress.undone:
        state = "working"
    else:
        state = "done" if progress.answers_taken >= progress.answers_due else "asked"
    if job_state in ENDED:
        return "done" if state == "done" else "stopped"
    return "unknown" if progress.unknown else state


def enter_leg1(activity: int) -> int:
    """Count an attempt of leg 1 as the database does; the thousandth raises `Overflow`."""
    if activity // digits.LEG1_ATTEMPT >= digits.MOST_LEG1_ATTEMPTS:
        raise Overflow.of_leg1(digits.render(activity))
    return activity + digits.LEG1_ATTEMPT


def enter_leg2(activity: int) -> int:
    """Count an entry into leg 2 as the database does; one more than 99,999,999 raises `Overflow`."""
    if activity % digits.ENTRIES >= digits.MOST_LEG2_ENTRIES:
        raise Overflow.of_leg2(digits.render(activity))
    return activity + digits.LEG2_ENTRY


class JobRetention:
    """Removes jobs that ended more than `keep_days` ago: `run` it as a task, in any number of processes.

    A sweep goes in slices, and rests after each four times as long as it took. None removes anything while the clock
    of Postgres is in doubt.
    """

    def __init__(self, pool: Pool, keep_days: float) -> None:
        self.removed = 0
        self._pool = pool
        self._keep = timedelta(days=keep_days)
        self._clock = DatabaseClock()

    async def run(self) -> None:
        """Sweep until cancelled; an outage of Postgres ends one sweep only."""
        while True:
            try:
                await self.sweep()
            except POSTGRES_ERRORS as error:
                _log.warning("job_sweep_failed", error=why_failed(error))
            await asyncio.sleep(_SWEEP_SECONDS)

    async def sweep(self, rows: int = _ROWS) -> int:
        """Remove what is old enough, `rows` at a time; return how many jobs that were."""
        if not await self._pool.fetchval(_RETENTION["has_jobs"]):
            return 0
        before = self.removed
        found = True
        while found and await self._clock.is_confirmed(self._pool):
            found = False
            for name, remove in _SLICES.items():
                started = time.monotonic()
                if count := await count_changed(self._pool, remove, self._keep, _JOBS, rows):
                    found = True
                    self.removed += count if name == "remove_jobs" else 0
                    await rest_since(started)
        if self.removed > before:
            _log.info("jobs_removed", jobs=self.removed - before)
        return self.removed - before
