"""What the handlers of a flow are given: where they are, and a connection whose transaction is the step's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID

Connect = Callable[[], Awaitable[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where a handler runs: which step of which activity, and how often it was tried."""

    mesh: str
    flow: str
    job: UUID
    activity: UUID
    name: str  # of the activity
    message: str | None = None  # id of the answer that leg 2 runs for; None in leg 1
    request_id: str | None = None  # message id of the request: what an answer names; None where nothing is sent
    dimension: int = 0  # the cycle, from 0; a leg 1 that `again` runs has that of the message that asked for it
    attempt: int = 1  # of this step, from 1
    last_error: str | None = None  # why the attempt before failed
    traceparent: str | None = None  # of what began the activity (leg 1), or of the answer (leg 2), where one was given
    idempotency_key: str  # the same for every attempt of this step, and for no other: for effects outside of Postgres
    _connect: Connect = field(repr=False)

    async def connection(self) -> Any:
        """Return the `asyncpg` connection of this step, in a transaction that begins now.

        It is committed together with the digit that says that the step is done: what is written on it happens exactly
        once. A handler that raises, or whose worker died or lost its lease, has written nothing. Do not end the
        transaction, and call this late in a handler that takes long: Postgres keeps what it locks until the end.
        """
        return await self._connect()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job that a completion handler reports on."""

    id: UUID
    flow: str
    mesh: str
    request: Any  # JSON that it was started with
    started_at: datetime
