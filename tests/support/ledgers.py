"""Jobs for tests: beginning them, moving them, and reading what the database holds of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID, uuid4

import asyncpg

from postroom._wire.digits import is_set, render
from postroom.ledger.primitives import Leg1, Leg2, Request, Start, complete_leg1, enter_leg1, enter_leg2, start_job

LEASE = timedelta(seconds=30)
_RUN_OUT = (
    "UPDATE ledger.activity SET leased_until = now() - interval '1 minute' WHERE owner IS NOT NULL AND id = $1",
    "UPDATE ledger.guid SET leased_until = now() - interval '1 minute' WHERE owner IS NOT NULL AND activity_id = $1",
)
_SET_BACK = (
    "UPDATE ledger.activity SET leased_until = leased_until + interval '10 years' WHERE id = $1",
    "UPDATE ledger.guid SET leased_until = leased_until + interval '10 years' WHERE activity_id = $1",
    "UPDATE ledger.request SET due_at = due_at + interval '10 years' WHERE activity_id = $1",
)
_PUBLISH = """
WITH published AS (
  UPDATE postroom.outbox_events SET
    published_at = now(), stream = 'S', stream_created_at = now(), stream_sequence = position
  WHERE published_at IS NULL
  RETURNING id, event_type, aggregate_type, aggregate_id, payload, position
)
SELECT * FROM published ORDER BY position
"""


def asking() -> Request:
    return Request(uuid4(), "asked", '{"what": "it"}')


@dataclass
class Jobs:
    """Every job in a database of its own."""

    connection: asyncpg.Connection[asyncpg.Record]

    async def begin(self) -> Start:
        start = Start(uuid4(), "sea", "nightly-export", uuid4(), "extract", '{"day": 1}')
        await start_job(self.connection, start)
        return start

    async def asked(self) -> Start:
        """Begin a job whose root has sent its request."""
        start = await self.begin()
        await self.ask(start.root)
        return start

    async def ask(self, activity: UUID) -> Leg1:
        leg1 = await enter_leg1(self.connection, activity, LEASE)
        await complete_leg1(self.connection, leg1, asking())
        return leg1

    async def enter(self, activity: UUID, guid: str = "m-1") -> Leg2:
        return await enter_leg2(self.connection, activity, guid, LEASE)

    async def activity(self, activity: UUID) -> str:
        """Render the ledger of an activity."""
        return render(await self.connection.fetchval("SELECT ledger FROM ledger.activity WHERE id = $1", activity))

    async def guid(self, activity: UUID, guid: str = "m-1") -> str:
        query = "SELECT ledger FROM ledger.guid WHERE activity_id = $1 AND guid = $2"
        return render(await self.connection.fetchval(query, activity, guid))

    async def job(self, job: UUID) -> tuple[str, int]:
        """Return the state and the semaphore of a job."""
        row = await self.connection.fetchrow("SELECT state, semaphore FROM ledger.job WHERE id = $1", job)
        assert row is not None
        return row["state"], row["semaphore"]

    async def events(self, job: UUID) -> list[str]:
        """List what a job put into the outbox, in order."""
        query = "SELECT event_type FROM postroom.outbox_events WHERE correlation_id = $1 ORDER BY position"
        return [row[0] for row in await self.connection.fetch(query, job)]

    async def publish(self) -> list[asyncpg.Record]:
        """Take what the outbox has not published yet, in order."""
        return await self.connection.fetch(_PUBLISH)

    async def set_ledger(self, activity: UUID, ledger: int) -> None:
        """Let an activity have come so far."""
        await self.connection.execute("UPDATE ledger.activity SET ledger = $2 WHERE id = $1", activity, ledger)

    async def end_leases(self, activity: UUID) -> None:
        """Let the leases of an activity and its messages have run out."""
        for query in _RUN_OUT:
            await self.connection.execute(query, activity)

    async def set_back(self, activity: UUID) -> None:
        """Set back, by ten years, the clock by which an activity has its leases and requests."""
        for query in _SET_BACK:
            await self.connection.execute(query, activity)


def seed_guid(activity: int) -> int:
    """Return the ledger of a message that is new, from the activity's ledger after its entry.

    It is the ordinal of that entry, the last eight digits alone: the whole ledger would set markers and the snapshot.
    """
    return activity % 10**8


def mark(ledger: int, marker: int) -> int:
    """Set the digit of weight `marker`, once: where it is set, the ledger is returned as it is."""
    return ledger if is_set(ledger, marker) else ledger + marker
