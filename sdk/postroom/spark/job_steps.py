"""The two legs of an activity, run by a Spark driver: the functions of the ledgers, and what their verdicts mean here.

Each function judges first and changes something only where its verdict is `done` (docs/contract/jobs.md#jobs-24).
Entries are leased for a moment, as nothing but the next statement follows them: whoever runs the write again waits that
long for a driver that was killed in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from uuid import UUID, uuid4

from postroom.errors import Conflict, NotFound, TryAgain
from postroom.sql import load_queries

if TYPE_CHECKING:
    import asyncpg

    Connection = asyncpg.Connection[asyncpg.Record]

QUERIES: Final = load_queries("postroom.spark", "jobs.sql")
_ENDED_WELL: Final = ("closed", "completed")
_LEASE: Final = timedelta(seconds=10)
_TOO_OFTEN: Final = (
    "the write was begun 999 times under this job, as often as a ledger can count: run it under another one, "
    "where rows that were sent are duplicates"
)


class Child(NamedTuple):
    """An activity to spawn; `request` is JSON."""

    id: UUID
    name: str
    request: str


class Answered(NamedTuple):
    """What leg 2 left: the result (JSON) of its work, and the owner of its lease where it has closed the job."""

    result: str
    closed_by: UUID | None


async def ask(connection: Connection, activity: UUID) -> None:
    """Run leg 1, which sends nothing: count the attempt, and complete it.

    A replay is counted too, unless its job was closed. Raises `NotFound` where there is no such activity, `Conflict`
    where its job ended early, and a retryable `TryAgain` where another driver is at it. An attempt that can't be
    counted fails the activity and its job, as it does in every flow (docs/jobs.md), and raises `Conflict`.
    """
    owner = uuid4()
    row = await _call(connection, "enter_leg1", activity, owner, _LEASE)
    if row["verdict"] == "done":
        row = await _call(connection, "complete_leg1", activity, owner)
    if row["verdict"] == "overflow":
        await connection.execute(QUERIES["fail"], activity, _TOO_OFTEN)
    if row["verdict"] not in ("done", "duplicate") and row["state"] not in _ENDED_WELL:
        _refuse(row)


async def answer(
    connection: Connection, activity: UUID, guid: str, result: str, children: Sequence[Child] = ()
) -> Answered:
    """Run what is left of leg 2 for the message `guid`: its work, with its result, and its children, in one commit.

    Where it was done before, the result of that time is returned. Raises as `ask` does.
    """
    owner = uuid4()
    row = await _call(connection, "enter_leg2", activity, guid, owner, _LEASE)
    if row["verdict"] == "duplicate":
        return Answered(row["result"], None)
    if row["verdict"] != "done":
        _refuse(row)
    if row["spawned"]:
        return Answered(row["result"], owner)  # it is here again because it has closed the job
    row = await _done(connection, "spawn", activity, guid, owner, result, *_columns(children))
    return Answered(result, owner if row["threshold_hit"] else None)


async def complete(connection: Connection, activity: UUID, guid: str, owner: UUID, result: str) -> None:
    """Complete the job that the message `guid` has closed: `job_completed` goes out with `result` (JSON)."""
    await _done(connection, "finish_job", activity, guid, owner, result)


async def give_up(connection: Connection, activity: UUID, guid: str, error: str) -> None:
    """Enter leg 2 for the message `guid` and leave it with `error`, where it is still to be done."""
    owner = uuid4()
    row = await _call(connection, "enter_leg2", activity, guid, owner, _LEASE)
    if row["verdict"] == "done":
        await connection.execute(QUERIES["release_leg2"], activity, guid, owner, error)


def _columns(children: Sequence[Child]) -> tuple[list[Any], list[Any], list[Any]]:
    return [child.id for child in children], [child.name for child in children], [child.request for child in children]


async def _done(connection: Connection, function: str, *values: Any) -> asyncpg.Record:
    row = await _call(connection, function, *values)
    if row["verdict"] != "done":
        _refuse(row)
    return row


async def _call(connection: Connection, function: str, activity: UUID, *values: Any) -> asyncpg.Record:
    row = await connection.fetchrow(QUERIES[function], activity, *values)
    if row is None:
        raise NotFound.of(
            404, "activity_missing", f"there is no activity {activity}: its job was removed, or is another"
        )
    return row


def _refuse(row: asyncpg.Record) -> NoReturn:
    verdict, state = row["verdict"], row["state"]
    if verdict == "held":
        raise TryAgain.of(503, "held", "another driver is at the same step of the job", retryable=True)
    if verdict == "lease_lost":
        raise TryAgain.of(503, "lease_lost", "the step took too long: it was not done", retryable=True)
    if verdict == "overflow":
        raise Conflict.of(409, "overflow", _TOO_OFTEN)
    if state == "cancelled":
        raise Conflict.of(409, "job_cancelled", "the job was cancelled, which is for good: write under another one")
    detail = f"the job is {state} ({verdict}), `postroom jobs show` says why: write under another one"
    raise Conflict.of(409, "job_inactive", detail)
