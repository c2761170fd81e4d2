"""Letting a failed job go on (docs/jobs.md, "Retry").

The ledgers stay as they are: they say what is done, and that is not done again. The rest goes out again, through the
event outbox, together with the job's new state: the `activity_spawned` of what has not begun, and an `activity_retried`
for a message that leg 2 has not done, with its id and what it said. So does what came while the job was failed, which
was acknowledged and kept (`enter_leg2`).
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

from postroom.chassis.postgres import Connection
from postroom.errors import Conflict
from postroom.ledger.digits import LEG1_COMPLETE, enter_leg1, enter_leg2, is_set
from postroom.ledger.errors import Overflow
from postroom.ledger.operating import QUERIES, hold, missing

_STATES: Final = {
    "running": "it is running: there is nothing to retry",
    "closed": "every step is done, and its completion tasks are running",
    "completed": "it is completed: start a new job",
    "cancelled": "it was cancelled permanently: start a new job",
}


async def retry_job(connection: Connection, job: UUID, *, actor: str, reason: str) -> None:
    """Let a failed job go on where it stopped, and emit `job_retried`.

    Raises `NotFound`, and `Conflict` where the job has not failed, its activity has no attempt left, or its request
    can't go out again because the outbox was pruned of it.
    """
    async with connection.transaction():
        await hold(connection, job)
        await _check_ceilings(connection, job)
        await _check_requests(connection, job)
        row = await connection.fetchrow(QUERIES["retry"], job, actor, reason)
        if row is None:
            raise missing(job)
        if not row["done"]:
            raise Conflict.of("job_not_failed", f"the job {job} cannot be retried: {_STATES[row['state']]}")


async def _check_ceilings(connection: Connection, job: UUID) -> None:
    """Refuse where another attempt has no place in the ledger of what failed: it would fail at once, again."""
    ledger = await connection.fetchval(QUERIES["find_failed"], job)
    try:
        if ledger is not None:
            enter_leg2(ledger) if is_set(ledger, LEG1_COMPLETE) else enter_leg1(ledger)
    except Overflow as error:
        raise Conflict.of("job_exhausted", f"the job {job} cannot be retried: {error}; start a new job") from error


async def _check_requests(connection: Connection, job: UUID) -> None:
    """Refuse where what failed waits for the answer to a request that nobody can send again: it would wait for ever."""
    pruned = await connection.fetchrow(QUERIES["find_pruned"], job)
    if pruned is not None:
        detail = (
            f"the job {job} cannot be retried: {pruned['name']!r} has no answer to its request {pruned['id']}, and "
            "the outbox has deleted that request by its age; start a new job"
        )
        raise Conflict.of("request_pruned", detail)
