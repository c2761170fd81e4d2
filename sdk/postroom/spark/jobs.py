"""A write as a job of the ledger: `option("job", …)` (docs/contract/spark.md#spark-11).

The job's root is the write. It is begun on the driver before a row is sent, and its leg 1 counts how often the write
was run. Its leg 2 is Spark's commit, which has one message of each partition, from the attempt that counts: it spawns
an activity for each partition, and then runs both legs of each. The last one closes the job, and `job_completed` goes
out.

Spark commits only what is sent whole. So the root's leg 2 keeps what each partition has counted, and whoever runs the
write again ends the bookkeeping that a killed driver had begun, by that driver's partitions, however many its own are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID, uuid5

import msgspec

from postroom.errors import Conflict, NotFound
from postroom.flow import SPARK_WRITE
from postroom.retry import Patience, retrying
from postroom.spark.database import chosen_url, connected
from postroom.spark.job_steps import QUERIES, Child, answer, ask, complete, give_up
from postroom.spark.options import WriteJob, WritePlan

if TYPE_CHECKING:
    import asyncpg

    Connection = asyncpg.Connection[asyncpg.Record]

_BEGIN_SECONDS: Final = 15.0  # for a lease to run out that a killed driver has left
_CLOSE_SECONDS: Final = 60.0  # for a Postgres that starts again: by then every row is sent
_ERROR_CHARACTERS: Final = 1000


class Counts(msgspec.Struct, frozen=True):
    """What became of the rows of a partition."""

    accepted: int
    duplicate: int
    conflict: int


class JobOfWrite:
    """The job of one write, on the driver; the daemons of the executors know nothing of it."""

    def __init__(self, plan: WritePlan, job: WriteJob) -> None:
        """Name the job's root by what makes it the same write: its target, mesh, namespace and id columns."""
        self.id = job.id
        self._job = job
        self._request = _json({"to": plan.to or plan.to_column, "namespace": plan.namespace, "id": plan.ids})
        self._root = uuid5(job.id, f"{job.mesh} {self._request}")

    def begin(self) -> None:
        """Begin the job, or count another run of it.

        Raises `Conflict` where it belongs to something else or ended early, and `NotFound` where there is no such mesh.
        """
        self._run(self._begin, _BEGIN_SECONDS)

    def close(self, counts: Sequence[Counts]) -> None:
        """Close the job, whose partitions have counted `counts`; what is done of it stays as it is.

        Raises `Conflict` where it was cancelled meanwhile. Returns when it is completed.
        """
        self._run(lambda connection, patience: self._close(connection, patience, counts), _CLOSE_SECONDS)

    def note_failure(self, error: str) -> None:
        """Let an operator see why the write has failed; the job goes on when it is run again."""
        self._run(
            lambda connection, _: give_up(connection, self._root, self._guid("write"), error[:_ERROR_CHARACTERS]),
            _BEGIN_SECONDS,
        )

    async def _begin(self, connection: Connection, _: Patience) -> None:
        if not await connection.fetchval(QUERIES["knows_mesh"], self._job.mesh):
            detail = f"there is no mesh {self._job.mesh!r}: `postroom mesh list` shows them"
            raise NotFound.of(404, "mesh_missing", detail)
        started = (self.id, self._job.mesh, SPARK_WRITE, self._root, "write", self._request)
        await connection.execute(QUERIES["start"], *started)
        job = await connection.fetchrow(QUERIES["find_job"], self.id)
        if job is None or job["root"] != self._root:
            raise self._taken(None if job is None else job["flow"])
        await ask(connection, self._root)

    def _taken(self, flow: str | None) -> Conflict:
        whose = "another write: to another target, of another mesh or namespace, or by other id columns"
        if flow is None:
            whose = "a job that ended so long ago that it was removed"
        elif flow != SPARK_WRITE:
            whose = f"the flow {flow!r}"
        return Conflict.of(409, "job_taken", f"the job {self.id} belongs to {whose}. Give this write an id of its own")

    async def _close(self, connection: Connection, patience: Patience, counts: Sequence[Counts]) -> None:
        job = await connection.fetchrow(QUERIES["find_job"], self.id)
        if job is not None and job["state"] == "completed":
            return
        children = [
            Child(self._child(number), "partition", _json({"partition": number})) for number in range(len(counts))
        ]
        write = await answer(connection, self._root, self._guid("write"), _json(counts), children)
        kept = msgspec.json.decode(write.result, type=list[Counts])
        for number, counted in enumerate(kept):
            await self._close_partition(connection, number, counted, kept)
            patience.restart()

    async def _close_partition(
        self, connection: Connection, number: int, counted: Counts, all_: Sequence[Counts]
    ) -> None:
        child, guid = self._child(number), self._guid(str(number))
        await ask(connection, child)
        answered = await answer(connection, child, guid, _json(counted))
        if answered.closed_by is not None:
            await complete(connection, child, guid, answered.closed_by, self._result(all_))

    def _result(self, counts: Sequence[Counts]) -> str:
        totals = {name: sum(getattr(each, name) for each in counts) for name in Counts.__struct_fields__}
        return _json({"partitions": len(counts), **totals})

    def _child(self, number: int) -> UUID:
        return uuid5(self._root, str(number))

    def _guid(self, word: str) -> str:
        return f"{self.id}/{word}"

    def _run(self, work: Callable[[Connection, Patience], Awaitable[None]], seconds: float) -> None:
        """Run `work`, which may be repeated; raises what stops it, and what has done so for `seconds`."""
        patience = Patience(seconds)

        async def attempt() -> None:
            async with connected(chosen_url(self._job.database_url, "has the job")) as connection:
                await work(connection, patience)

        asyncio.run(retrying(attempt, patience))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
