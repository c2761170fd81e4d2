"""Requests that wait for their answers: finding whose an answer is, and asking again in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple
from uuid import UUID

from postroom.chassis.postgres import Connection, Pool
from postroom.chassis.sql import load_queries

QUERIES: Final = load_queries("postroom.ledger", "requests.sql")

MOST_AT_ONCE: Final = 100  # requests that one look asks again for


class Asker(NamedTuple):
    """The activity that sent a request."""

    activity: UUID
    name: str


class Overdue(NamedTuple):
    """A request whose answer is overdue."""

    id: UUID
    activity: UUID


async def find_askers(pool: Pool, flow: str, requests: Sequence[UUID]) -> dict[UUID, Asker]:
    """Return which activities of `flow` sent those of `requests` that any of them sent."""
    if not requests:
        return {}
    rows = await pool.fetch(QUERIES["find_requests"], requests, flow)
    return {row["id"]: Asker(row["activity"], row["name"]) for row in rows}


async def find_overdue(pool: Pool, flow: str) -> list[Overdue]:
    """Return some requests of `flow` whose answer is overdue, oldest first; of however many, it reads those alone."""
    rows = await pool.fetch(QUERIES["find_overdue"], flow, MOST_AT_ONCE)
    return [Overdue(row["id"], row["activity"]) for row in rows]


async def ask_again(connection: Connection, overdue: Overdue) -> str | None:
    """Have an overdue request go out again; return why it can't where it was asked as often as it may be.

    Where it was answered meanwhile, or its job has ended, nothing happens.
    """
    async with connection.transaction():
        await connection.execute(QUERIES["take_turn"], overdue.activity)
        row = await connection.fetchrow(QUERIES["ask_again"], overdue.activity, overdue.id)
    if row is None or row["verdict"] != "exhausted":
        return None
    times = "once" if row["asked"] == 1 else f"{row['asked']} times"
    return f"no answer to the request {overdue.id}, asked {times}, each time for {row['seconds']:g} s"
