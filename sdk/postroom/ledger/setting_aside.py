"""Messages for activities that the worker which takes them does not have: its flow is older, or a name changed.

They are acknowledged and kept, no attempt is counted, and the job waits, visibly (`ledger.operating`). A worker that
has the activity brings them back: each goes out again through the event outbox, as the message that it was.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from typing import Final
from uuid import UUID

from postroom.chassis.postgres import Connection
from postroom.chassis.sql import load_queries
from postroom.ledger.primitives import Answer

QUERIES: Final = load_queries("postroom.ledger", "setting_aside.sql")

_MOST_AT_ONCE: Final = 100  # messages that one look brings back


def this_worker() -> str:
    """Name this process to operators: its host and its pid."""
    return f"{socket.gethostname()[:64]}/{os.getpid()}"


async def set_aside(connection: Connection, activity: UUID, guid: str, answer: Answer | None, worker: str) -> bool:
    """Keep a message for a worker that has its activity, which `worker` has not; of leg 1 it has no `answer`.

    Returns False where nobody has to handle it any more: it is done, or its job has ended for good, or is gone.
    """
    leg, said = (1, (None, None, None, None)) if answer is None else (2, answer)
    return await connection.fetchrow(QUERIES["set_aside"], activity, guid, leg, *said, worker) is not None


async def bring_back(connection: Connection, flow: str, activities: Collection[str]) -> int:
    """Have some messages of these `activities` go out again, oldest first; returns how many."""
    return len(await connection.fetch(QUERIES["bring_back"], flow, list(activities), _MOST_AT_ONCE))
