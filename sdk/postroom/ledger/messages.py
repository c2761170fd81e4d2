"""What the ledgers know of one message: an operator found its id in a log, and asks what became of it.

The id may also be an activity's, which the logs of workers name as well.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import asyncpg
import msgspec

from postroom._wire.jobs import JobMessage
from postroom._wire.sql import load_queries
from postroom.chassis.postgres import Connection
from postroom.errors import NotFound
from postroom.ledger.digits import render

QUERIES: Final = load_queries("postroom.ledger", "messages.sql")


async def find_message(connection: Connection, message: str) -> list[JobMessage]:
    """Return what a message was to each activity that it concerned; raises `NotFound`.

    The id is known also as it is where the message was published again (`/1`) or replayed (`~consumer.1`).
    """
    known = message.partition("~")[0]
    head, slash, epoch = known.rpartition("/")
    if slash and epoch.isdecimal():
        known = head
    rows = await connection.fetch(QUERIES["find_message"], known, _uuid(known))
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
            ledger=None if row["ledger"] is None else render(row["ledger"]),
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
            return f"it is a request of the activity ({_asked(row)})"
        case "event":
            return f"it is a transition of the activity ({row['by']}, {_published(row)})"
        case _:
            return "it is an activity, not a message"


def _asked(row: asyncpg.Record) -> str:
    times = "once" if row["times"] == 1 else f"{row['times']} times"
    if row["by"] is not None:
        return f"{times}, answered by {row['by']}"
    due = "" if row["at"] is None else f", due at {row['at']:%Y-%m-%d %H:%M:%SZ}"
    return f"{times}, not answered{due}"


def _published(row: asyncpg.Record) -> str:
    return "not published yet" if row["at"] is None else f"published at {row['at']:%Y-%m-%d %H:%M:%SZ}"


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


def unknown_message(message: str) -> NotFound:
    """Say that nothing is known of it."""
    detail = (
        f"the ledgers know no message and no activity {message!r}: no activity asked with it, and leg 2 of none was "
        "entered with it; `postroom jobs show` takes the id of a job"
    )
    return NotFound.of("message_missing", detail)
