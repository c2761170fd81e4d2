"""A write as a job of the ledger: `option("job", …)` (docs/contract/spark.md#spark-11).

The job's root is the write. It is begun on the driver before a row is sent, and its leg 1 counts how often the write
was run. Its leg 2 is Spark's commit, which has one message of each partition, from the attempt that counts: it spawns
an activity for each partition, and then runs both legs of each. The last one closes the job, and `job_completed` goes
out.

Spark commits only what is sent whole. So the root's leg 2 keeps what each partition has counted, and a driver that runs
the write again finishes the bookkeeping that a killed driver had begun, by that driver's partitions, even if it has
another number of them.

The functions of the ledgers check first and change something only where their verdict is `done`
(docs/contract/jobs.md#jobs-24). Entries are leased for a few seconds, since only the next statement follows them: a
driver that runs the write again waits that long for one that was killed in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn
from uuid import UUID, uuid4, uuid5

import msgspec

from postroom._wire.retry import Patience, retrying
from postroom._wire.spark import partition_id
from postroom._wire.sql import load_queries
from postroom.errors import Conflict, NotFound, TryAgain
from postroom.flow import SPARK_WRITE
from postroom.spark.database import chosen_url, connected
from postroom.spark.options import WriteJob, WritePlan

if TYPE_CHECKING:
    import asyncpg

    Connection = asyncpg.Connection[asyncpg.Record]


QUERIES: Final = load_queries("postroom.spark", "jobs.sql")
_ENDED_WELL: Final = ("closed", "completed")
_LEASE: Final = timedelta(seconds=10)
_TOO_OFTEN: Final = (
    "the write was begun 999 times under this job, the most that a ledger can count: run it under another "
    "job; rows that were sent are duplicates there"
)
_BEGIN_SECONDS: Final = 15.0  # longer than the lease that a killed driver has left
_CLOSE_SECONDS: Final = 60.0  # for a restart of Postgres: by then every row is sent
_ERROR_CHARACTERS: Final = 1000


class Answered(NamedTuple):
    """What leg 2 left: the result (JSON) of its work, and the owner of its lease where it has closed the job."""

    result: str
    closed_by: UUID | None


async def ask(connection: Connection, activity: UUID) -> None:
    """Run leg 1, which sends nothing: count the attempt, and complete it.

    A replay is counted too, unless its job was closed. Raises `NotFound` where there is no such activity, `Conflict`
    where its job ended early, and a retryable `TryAgain` where another driver runs it. An attempt that can't be
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
    connection: Connection, activity: UUID, guid: str, result: str, partitions: Mapping[UUID, str]
) -> Answered:
    """Run what is left of leg 2 for the message `guid`: its work, with its result, and its children, in one commit.

    These are the activities of `partitions`, each with its request (JSON). Where it was done before, it returns that
    result. Raises as `ask` does.
    """
    owner = uuid4()
    row = await _call(connection, "enter_leg2", activity, guid, owner, _LEASE)
    if row["verdict"] == "duplicate":
        return Answered(row["result"], None)
    if row["verdict"] != "done":
        _refuse(row)
    if row["spawned"]:
        return Answered(row["result"], owner)  # the message came again because it has closed the job
    children = (list(partitions), ["partition"] * len(partitions), list(partitions.values()))
    row = await _done(connection, "spawn", activity, guid, owner, result, *children)
    return Answered(result, owner if row["threshold_hit"] else None)


async def _done(connection: Connection, function: str, *values: Any) -> asyncpg.Record:
    row = await _call(connection, function, *values)
    if row["verdict"] != "done":
        _refuse(row)
    return row


async def _call(connection: Connection, function: str, activity: UUID, *values: Any) -> asyncpg.Record:
    row = await connection.fetchrow(QUERIES[function], activity, *values)
    if row is None:
        raise NotFound.of(
            "activity_missing", f"there is no activity {activity}: its job was deleted, or is another one"
        )
    return row


def _refuse(row: asyncpg.Record) -> NoReturn:
    verdict, state = row["verdict"], row["state"]
    if verdict == "held":
        raise TryAgain.of("held", "another driver runs the same step of the job", retryable=True)
    if verdict == "lease_lost":
        raise TryAgain.of("lease_lost", "the step took too long and was not done", retryable=True)
    if verdict == "overflow":
        raise Conflict.of("overflow", _TOO_OFTEN)
    if state == "cancelled":
        raise Conflict.of("job_cancelled", "the job was cancelled permanently: write under another job")
    detail = f"the job is {state} ({verdict}), `postroom jobs show` says why: write under another job"
    raise Conflict.of("job_inactive", detail)


class Counts(msgspec.Struct, frozen=True):
    """What became of the rows of a partition."""

    accepted: int
    duplicate: int
    conflict: int
    refused: int = 0  # missing where a driver of an older version began the commit


class JobOfWrite:
    """The job of one write, on the driver; the executors' daemons do not know it."""

    def __init__(self, plan: WritePlan, job: WriteJob) -> None:
        """Derive the root's id from what identifies the write: its target, mesh, namespace and id columns."""
        self.id = job.id
        self._job = job
        self._request = _json(
            {"to": plan.options.to or plan.options.to_column, "namespace": plan.namespace, "id": plan.ids}
        )
        self._root = uuid5(job.id, f"{job.mesh} {self._request}")

    def begin(self) -> None:
        """Begin the job, or count another run of it.

        Raises `Conflict` where it belongs to something else or ended early, and `NotFound` where there is no such mesh.
        """
        self._run(self._begin, _BEGIN_SECONDS)

    def close(self, counts: Sequence[Counts]) -> None:
        """Close the job, whose partitions have counted `counts`; what is done of it already stays.

        Raises `Conflict` where it was cancelled meanwhile. Returns when it is completed.
        """
        self._run(lambda connection, patience: self._close(connection, patience, counts), _CLOSE_SECONDS)

    def note_failure(self, error: str) -> None:
        """Record why the write has failed, for an operator; the job goes on when the write is run again."""

        async def note(connection: Connection, _: Patience) -> None:
            owner, entry = uuid4(), (self._root, self._guid("write"))
            row = await _call(connection, "enter_leg2", *entry, owner, _LEASE)
            if row["verdict"] == "done":
                await connection.execute(QUERIES["release_leg2"], *entry, owner, error[:_ERROR_CHARACTERS])

        self._run(note, _BEGIN_SECONDS)

    async def _begin(self, connection: Connection, _: Patience) -> None:
        if not await connection.fetchval(QUERIES["knows_mesh"], self._job.mesh):
            detail = f"there is no mesh {self._job.mesh!r}: `postroom mesh list` shows them"
            raise NotFound.of("mesh_not_found", detail)
        started = (self.id, self._job.mesh, SPARK_WRITE, self._root, "write", self._request)
        await connection.execute(QUERIES["start"], *started)
        job = await connection.fetchrow(QUERIES["find_job"], self.id)
        if job is None or job["root"] != self._root:
            flow = None if job is None else job["flow"]
            whose = "another write: to another target, of another mesh or namespace, or by other id columns"
            if flow is None:
                whose = "a job that ended so long ago that it was deleted"
            elif flow != SPARK_WRITE:
                whose = f"the flow {flow!r}"
            raise Conflict.of("job_taken", f"the job {self.id} belongs to {whose}. Give this write an id of its own")
        await ask(connection, self._root)

    async def _close(self, connection: Connection, patience: Patience, counts: Sequence[Counts]) -> None:
        job = await connection.fetchrow(QUERIES["find_job"], self.id)
        if job is not None and job["state"] == "completed":
            return
        partitions = {partition_id(self._root, number): _json({"partition": number}) for number in range(len(counts))}
        write = await answer(connection, self._root, self._guid("write"), _json(counts), partitions)
        kept = msgspec.json.decode(write.result, type=list[Counts])
        for number, counted in enumerate(kept):
            child, guid = partition_id(self._root, number), self._guid(str(number))
            await ask(connection, child)
            answered = await answer(connection, child, guid, _json(counted), {})
            if answered.closed_by is not None:
                totals = {name: sum(getattr(each, name) for each in kept) for name in Counts.__struct_fields__}
                result = _json({"partitions": len(kept), **totals})
                await _done(connection, "finish_job", child, guid, answered.closed_by, result)
            patience.restart()

    def _guid(self, word: str) -> str:
        return f"{self.id}/{word}"

    def _run(self, work: Callable[[Connection, Patience], Awaitable[None]], seconds: float) -> None:
        """Run `work`, which may be repeated; raises its errors, retryable ones after `seconds`."""
        patience = Patience(seconds)

        async def attempt() -> None:
            async with connected(chosen_url(self._job.database_url, "has the job")) as connection:
                await work(connection, patience)

        asyncio.run(retrying(attempt, patience))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
