"""The rules of the ledgers' tables hold whoever writes."""

from __future__ import annotations

import asyncpg
import pytest

from postroom.chassis.postgres import migrate
from postroom.ledger import ROOMS

JOB = "INSERT INTO ledger.job (id, context, flow) VALUES ('00000000-0000-0000-0000-000000000001', 'sea', 'export')"
ROOT = (
    "INSERT INTO ledger.activity (id, job_id, name, request)"
    " SELECT '00000000-0000-0000-0000-00000000000a', id, 'extract', '{}' FROM ledger.job"
)
READY = "UPDATE ledger.activity SET ledger = 1100000000001, answers_taken = 1"
GUID = "INSERT INTO ledger.guid (activity_id, guid, job_id, ledger) SELECT id, 'm-1', job_id, 1 FROM ledger.activity"


async def test_what_breaks_a_rule_of_the_ledgers_is_refused(database_url: str) -> None:
    await migrate(database_url, *ROOMS)
    connection = await asyncpg.connect(database_url)
    for statement in (JOB, ROOT, READY, GUID):
        await connection.execute(statement)
    kept = []
    for statement in REFUSED:
        try:
            await connection.execute(statement)
            kept.append(statement)
        except asyncpg.IntegrityConstraintViolationError:
            pass
    await connection.close()

    assert kept == []


REFUSED = (
    # the digits
    "UPDATE ledger.activity SET ledger = 1000000000000000",
    "UPDATE ledger.activity SET ledger = 1200000000001",
    "UPDATE ledger.activity SET ledger = 1120000000001",
    "UPDATE ledger.activity SET ledger = 1112000000001",
    "UPDATE ledger.activity SET ledger = 1111200000001",
    # only up, each digit for itself
    "UPDATE ledger.activity SET ledger = ledger - 1",
    "UPDATE ledger.activity SET ledger = ledger - 1000000000000",
    "UPDATE ledger.activity SET ledger = 2000000000000",
    "UPDATE ledger.guid SET ledger = 2",
    # in order
    "UPDATE ledger.activity SET ledger = ledger + 1000000000",
    "UPDATE ledger.activity SET ledger = ledger + 100000000",
    "UPDATE ledger.guid SET ledger = ledger + 10000000000",  # without its result
    "UPDATE ledger.guid SET ledger = ledger + 1000000000",
    "UPDATE ledger.guid SET ledger = 111000000001",  # the same
    "UPDATE ledger.guid SET ledger = 110000000001, result = '{}'",
    "UPDATE ledger.guid SET ledger = 11100000001, result = '{}'",
    "UPDATE ledger.guid SET ledger = 1000000000001",
    # beginnings
    GUID.replace("'m-1', job_id, 1", "'m-2', job_id, 0"),
    GUID.replace("'m-1', job_id, 1", "'m-2', job_id, 100000001"),
    GUID,
    GUID.replace("m-1", ""),
    ROOT.replace("00a", "00b"),  # a second root
    ROOT.replace("request)", "request, ledger)").replace("'{}'", "'{}', 1000000000000").replace("00a", "00b"),
    # obligations
    "UPDATE ledger.job SET semaphore = -1",
    "UPDATE ledger.job SET semaphore = 0",
    "UPDATE ledger.job SET state = 'closed'",
    "UPDATE ledger.job SET state = 'completed', semaphore = 0, ended_at = now()",
    "UPDATE ledger.job SET state = 'failed', ended_at = now()",
    "UPDATE ledger.job SET state = 'cancelled', ended_at = now()",
    "UPDATE ledger.job SET state = 'cancelled', error = 'why'",
    "UPDATE ledger.activity SET answers_taken = 2",
    "UPDATE ledger.activity SET parent_id = id",
    # leases
    "UPDATE ledger.activity SET owner = id",
    "UPDATE ledger.guid SET leased_until = now()",
)

TRANSITIONS = {
    "running": "state = 'running', semaphore = 1, ended_at = NULL, error = NULL",
    "closed": "state = 'closed', semaphore = 0, ended_at = NULL, error = NULL",
    "completed": "state = 'completed', semaphore = 0, ended_at = now(), error = NULL",
    "failed": "state = 'failed', ended_at = now(), error = 'why'",
    "cancelled": "state = 'cancelled', ended_at = now(), error = 'why'",
}
WAYS = {
    "running": [],
    "closed": ["closed"],
    "completed": ["closed", "completed"],
    "failed": ["failed"],
    "failed at its end": ["closed", "failed"],
    "cancelled": ["cancelled"],
}
ALLOWED = {
    "running": {"running", "closed", "failed", "cancelled"},
    "closed": {"closed", "completed", "failed", "cancelled"},
    "completed": set(),
    "failed": {"running", "cancelled"},
    "failed at its end": {"closed", "cancelled"},
    "cancelled": set(),
}


@pytest.mark.parametrize("before", WAYS)
async def test_a_job_goes_only_from_state_to_state_as_drawn(database_url: str, before: str) -> None:
    await migrate(database_url, *ROOMS)
    connection = await asyncpg.connect(database_url)
    reached = set()
    for after, change in TRANSITIONS.items():
        await connection.execute("DELETE FROM ledger.job")
        await connection.execute(JOB)
        for state in WAYS[before]:
            await connection.execute(f"UPDATE ledger.job SET {TRANSITIONS[state]}")  # noqa: S608 - a literal above
        try:
            await connection.execute(f"UPDATE ledger.job SET {change}")  # noqa: S608 - the same
        except asyncpg.IntegrityConstraintViolationError:
            continue
        reached.add(after)
    await connection.close()

    assert reached == ALLOWED[before]
