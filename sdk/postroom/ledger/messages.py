"""What the ledgers know of one message: an operator found its id in a log, and asks what became of it.

The id may also be an activity's, which the logs of workers name as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Self
from uuid import UUID

import asyncpg
import msgspec

from postroom._wire.sql import load_queries
from postroom.chassis.postgres import Connection
from postroom.errors import NotFound
from postroom.ledger.digits import render

QUERIES: Final = load_queries("postroom.ledger", "messages.sql")


class MessageRow(msgspec.Struct, kw_only=True, frozen=True):
    """What a message was to one activity: a sentence; where leg 2 ran for it, its ledger and how often it came.

    `said` is its body where that is known, of an activity what it was spawned with.
    """

    id: str
    what: str
    sentence: str
    mesh: str
    flow: str
    job: UUID
    job_state: str
    activity: UUID
    name: str
    ledger: str | None
    deliveries: int | None
    said: msgspec.Raw | None
    error: str | None

    @classmethod
    def of(cls, message: str, row: asyncpg.Record) -> Self:
        """Read a row of `find_message`."""
        return cls(
            id=message,
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
            said=None if row["said"] is None else msgspec.Raw(row["said"].encode()),
            error=row["error"],
        )


async def find_message(connection: Connection, message: str) -> Sequence[MessageRow]:
    """Return what a message was to each activity that it concerned; raises `NotFound`.

    The id is known also as it is where the message was published again (`/1`) or replayed (`~consumer.1`).
    """
    known = message.partition("~")[0]
    head, slash, epoch = known.rpartition("/")
    if slash and epoch.isdecimal():
        known = head
    rows = await connection.fetch(QUERIES["find_message"], known, _uuid(known))
    if not rows:
        raise _unknown(message)
    return [MessageRow.of(known, row) for row in rows]


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


def _unknown(message: str) -> NotFound:
    detail = (
        f"the ledgers know no message and no activity {message!r}: no activity asked with it, and leg 2 of none was "
        "entered with it; `postroom jobs show` takes the id of a job"
    )
    return NotFound.of("message_missing", detail)
