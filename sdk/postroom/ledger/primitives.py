"""The primitives of the ledgers: entries, steps, and the leases that they need (docs/contract/jobs.md#jobs-1).

Each is a function of the database (`migrations/0001_jobs.sql`), and a commit of its own or part of the caller's: in a
transaction of the caller, what it wrote before becomes durable together with the digit that proves it, or not at all.
Entries are never part of one: an entry that is rolled back is not counted. Each raises a `Fault` that changes nothing;
in a transaction, the caller rolls back what it wrote for the step.

An entry leases its message to the caller, for `lease`. A step of a lease that ran out raises `LeaseLost`.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from operator import itemgetter
from typing import Final, NamedTuple
from uuid import UUID, uuid4

import asyncpg

from postroom._wire.digits import GuidLedger, decode_guid, render
from postroom._wire.sql import load_queries
from postroom.chassis.postgres import Connection
from postroom.claims import Claim, Key
from postroom.ledger.errors import Duplicate, Exhausted, Forbidden, Held, Inactive, LeaseLost, Missing, Overflow

QUERIES: Final = load_queries("postroom.ledger")
# what an entry returns of a leg, in the order of the leg's fields after its claim
_LEG1: Final = itemgetter("job_id", "context", "name", "request", "ledger", "attempt", "last_error", "trace")
_LEG2: Final = itemgetter("job_id", "context", "name", "ledger", "attempt", "last_error", "trace")


class Start(NamedTuple):
    """A job to begin; ids are the caller's, so that a repeated start is known. `request` is JSON.

    The answer that leaves no more than `threshold` open closes it (docs/contract/jobs.md#jobs-22).
    """

    job: UUID
    context: str
    flow: str
    root: UUID
    name: str
    request: str = "null"
    threshold: int = 0
    traceparent: str | None = None


class Child(NamedTuple):
    """An activity to spawn; `request` is JSON."""

    id: UUID
    name: str
    request: str = "null"


class Request(NamedTuple):
    """A command that asks for an answer: its id is the message id, which the answer names; `payload` is JSON.

    Without an answer within `timeout` it goes out again, `asks` times in all.
    """

    id: UUID
    queue: str
    payload: str = "null"
    timeout: timedelta | None = None
    asks: int = 1


class Answer(NamedTuple):
    """The content of a leg-2 message (JSON), the id of the request that it answers, and the event that it came as.

    Both are None where nothing was sent. Without a `traceparent` the activity's own is used.
    """

    body: str = "null"
    request: UUID | None = None
    event: str | None = None
    traceparent: str | None = None


NO_ANSWER: Final = Answer()


class Leg1(NamedTuple):
    """An attempt of leg 1, which `claim` leases; `attempt` counts from the job's last retry on, from 1.

    `last_error` is why the one before failed.
    """

    activity: UUID
    claim: Claim
    job: UUID
    context: str
    name: str
    request: str
    ledger: int
    attempt: int
    last_error: str | None
    traceparent: str | None


class Leg2(NamedTuple):
    """An entry into leg 2 with one message, which `claim` leases; `ledger` is the message's, as the entry found it.

    `attempt` counts the message's entries, from 1: since the last retry of the job, or, where it has closed the job,
    for its completion.
    """

    activity: UUID
    guid: str
    claim: Claim
    job: UUID
    context: str
    name: str
    ledger: int
    attempt: int
    last_error: str | None
    traceparent: str | None

    @property
    def steps(self) -> GuidLedger:
        """Which steps are done, and the dimension."""
        return decode_guid(self.ledger)


class Spawned(NamedTuple):
    """What steps 1 and 2 left: the message's ledger, the job's semaphore, and whether this closed the job."""

    ledger: int
    semaphore: int
    threshold_hit: bool


async def start_job(connection: Connection, start: Start) -> None:
    """Begin a job with its root activity, and emit `job_started`; raises `Duplicate` where there is that job."""
    row = await connection.fetchrow(QUERIES["start"], *start)
    if row is None:
        raise Duplicate.of_what(f"the job {start.job} is begun")


async def enter_leg1(connection: Connection, activity: UUID, lease: timedelta, most: int | None = None) -> Leg1:
    """Count an attempt of leg 1, and lease it.

    Raises `Duplicate` where leg 1 is complete, which is counted too (docs/contract/jobs.md#jobs-11), `Overflow` for
    attempt 1000, `Exhausted` for one more than `most`, `Held`, `Inactive` and `Missing`.
    """
    owner, started = uuid4(), time.monotonic()
    found = await connection.fetchrow(QUERIES["enter_leg1"], activity, owner, lease, most)
    row = _done(found, activity, step="leg 1", needs="nothing")
    claim = _claim((str(activity),), owner, row, started + lease.total_seconds())
    return Leg1(activity, claim, *_LEG1(row))


async def complete_leg1(connection: Connection, leg1: Leg1, request: Request | None = None) -> int:
    """Complete leg 1 and put its `request` into the outbox; an activity that sends nothing has none.

    Returns the activity's ledger. Raises `LeaseLost`, `Duplicate`, `Inactive` and `Missing`.
    """
    asked = (None,) * 5 if request is None else request
    row = await connection.fetchrow(QUERIES["complete_leg1"], leg1.activity, leg1.claim.owner, *asked)
    return int(_done(row, leg1.activity, step="completing leg 1", needs="its entry")["ledger"])


async def enter_leg2(
    connection: Connection,
    activity: UUID,
    guid: str,
    lease: timedelta,
    answer: Answer = NO_ANSWER,
    *,
    most: int | None = None,
    most_completions: int | None = None,
) -> Leg2:
    """Enter leg 2 with the message `guid`, and lease it; its ledger is made by its first entry.

    The message's content is kept with it: a retry of the job goes on with it (`ledger.operations`). Raises `Forbidden`
    before leg 1 is complete, `Duplicate` where the message is done, or the answer to its request, or every answer that
    is due, was taken by another, `Overflow` for entry 100,000,000, `Exhausted` for an attempt more than `most`, or,
    of a message that has closed the job, for one more than `most_completions`, `Held`, `Inactive` and `Missing`.
    """
    owner, started = uuid4(), time.monotonic()
    found = await connection.fetchrow(
        QUERIES["enter_leg2"],
        activity,
        guid,
        owner,
        lease,
        answer.body,
        answer.request,
        most,
        most_completions,
        answer.traceparent,
    )
    row = _done(found, activity, step="leg 2", needs="the completion of leg 1")
    claim = _claim((str(activity), guid), owner, row, started + lease.total_seconds())
    return Leg2(activity, guid, claim, *_LEG2(row))


async def spawn(
    connection: Connection,
    leg2: Leg2,
    children: Sequence[Child] = (),
    again: Sequence[str] = (),
    requests: Sequence[Request] = (),
) -> Spawned:
    """Do steps 1 and 2 by one statement, whatever it spawns (docs/contract/jobs.md#jobs-17).

    `children` go out as `activity_spawned`; for each request in `again` (JSON) the activity is entered once more, with
    the `activity_cycled` that goes out, and for each of `requests` with the answer to it.
    Raises `LeaseLost`, also where the steps are done and gave up their lease, `Inactive` and `Missing`.
    """
    found = await connection.fetchrow(
        QUERIES["spawn"],
        leg2.activity,
        leg2.guid,
        leg2.claim.owner,
        [child.id for child in children],
        [child.name for child in children],
        [child.request for child in children],
        list(again),
        [request.id for request in requests],
        [request.queue for request in requests],
        [request.payload for request in requests],
        [request.timeout for request in requests],
        [request.asks for request in requests],
    )
    row = _done(found, leg2.activity, step="step 2", needs="the entry")
    return Spawned(row["ledger"], row["semaphore"], bool(row["threshold_hit"]))


async def finish_job(connection: Connection, leg2: Leg2, result: str = "null") -> int:
    """Step 3: mark the completion tasks as done, and emit `job_completed` with the `result` (JSON) that they had.

    Returns the message's ledger.
    Raises `Forbidden` for a message that did not close the job, `LeaseLost`, `Inactive` and `Missing`.
    """
    row = await connection.fetchrow(QUERIES["finish_job"], leg2.activity, leg2.guid, leg2.claim.owner, result)
    return int(_done(row, leg2.activity, step="step 3", needs="the snapshot")["ledger"])


async def fail_activity(connection: Connection, activity: UUID, error: str) -> None:
    """Fail an activity and its job, visibly: `error` is in both, and in `job_failed`; no ledger moves.

    Raises `Inactive` where the job has ended, and `Missing`.
    """
    row = await connection.fetchrow(QUERIES["fail"], activity, error)
    _done(row, activity, step="failing", needs="nothing")


async def renew(connection: Connection, claim: Claim, lease: timedelta) -> None:
    """Prolong a lease that still holds, by `lease` from now; raises `LeaseLost` where it ran out."""
    query = QUERIES["renew_leg1" if len(claim.key) == 1 else "renew_leg2"]
    if await connection.fetchrow(query, *claim.key, claim.owner, lease) is None:
        raise LeaseLost.of_entry()


async def release(connection: Connection, entry: Leg1 | Leg2, error: str | None = None) -> None:
    """Give up a lease after an attempt that failed with `error`, so that the next one, which gets it, need not wait.

    A lost lease stays lost.
    """
    query = QUERIES["release_leg1" if isinstance(entry, Leg1) else "release_leg2"]
    await connection.execute(query, *entry.claim.key, entry.claim.owner, error)


def _claim(key: Key, owner: UUID, row: asyncpg.Record, until: float) -> Claim:
    return Claim(key, str(owner), row["attempt"], row["last_error"], None, until)


def _done(row: asyncpg.Record | None, activity: UUID, *, step: str, needs: str) -> asyncpg.Record:
    """Return the row of a primitive that was done; raises the fault that refused it."""
    if row is None:
        detail = f"there is no activity {activity}: its job was removed, or never begun"
        raise Missing.of("activity_missing", detail)
    match row["verdict"]:
        case "done":
            return row
        case "inactive":
            raise Inactive.of("inactive", f"the activity {activity} accepts no message: {row['state']}")
        case "duplicate":
            raise Duplicate.of_what(f"{step} of the activity {activity} is done")
        case "forbidden":
            raise Forbidden.of("forbidden", f"{step} comes after {needs}: try again later", retryable=True)
        case "held":
            detail = f"another worker has it, for {row['seconds']:.0f} s unless it renews its lease: try again later"
            raise Held.of("held", detail, retryable=True, retry_after=row["seconds"])
        case "lease_lost":
            raise LeaseLost.of_entry()
        case "exhausted":
            closed = step == "leg 2" and decode_guid(row["ledger"]).job_closed
            attempt = f"attempt {row['attempt']} of {row['attempt']} of {'the completion' if closed else step}"
            before = "" if row["last_error"] is None else f"; an earlier attempt failed: {row['last_error']}"
            detail = f"{attempt} ended without a result: its worker was killed, or lost its lease{before}"
            raise Exhausted.of("exhausted", detail)
        case "overflow" if step == "leg 1":
            raise Overflow.of_leg1(render(row["ledger"]))
        case _:
            raise Overflow.of_leg2(render(row["activity_ledger"]))
