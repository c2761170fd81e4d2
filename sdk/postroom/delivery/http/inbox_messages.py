"""The inbox of one consumer in Postgres: which process attempts which message (docs/contract/delivery.md#delivery-31).

What makes a second delivery harmless is its row here, a claim (`postroom.claims`) under (source context, message id,
consumer): once processed it is skipped, before that it is the next attempt (docs/contract/delivery.md#delivery-32).

An outage of Postgres is waited out, however long: it counts as no message's failure, and none is lost. Values that
Postgres refuses would be refused again, so that error (`REFUSED`) is raised to the caller.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import uuid4

import asyncpg
import structlog
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom._wire.retry import Backoff
from postroom._wire.sql import load_queries
from postroom.chassis.clock import DatabaseClock
from postroom.chassis.grouped import Grouped
from postroom.chassis.postgres import POSTGRES_ERRORS, REFUSED, Connection, Pool, count_changed, open_rooms, rest_since
from postroom.claims import Claim, Ended, Outcome, State, Table
from postroom.claims.leases import Leases, renewed
from postroom.claims.postgres import PostgresClaims
from postroom.delivery import ROOM
from postroom.delivery.consumer import ACK_TIMEOUT
from postroom.delivery.errors import NATS_ERRORS, why_passing
from postroom.delivery.http.client import NOBODY_THERE
from postroom.delivery.http.requests import Incoming
from postroom.delivery.nats import CLOCK_SKEW, end_if_cancelled
from postroom.delivery.settings import InboxSettings
from postroom.delivery.subjects import expression_of

_log = structlog.get_logger(__name__)

QUERIES: Final = load_queries(__package__)

_TABLE: Final = Table(
    "postroom.inbox_messages",
    ("source_context", "message_id", "consumer"),
    "leased_until",
    "begun_at",
    expired=ACK_TIMEOUT,
    given=("subject", "causation_id"),
    owner="uuid",
)
_PARTS: Final = load_queries(__package__, "claims.sql")
_GROUP: Final = 500  # messages in a statement
_TRIED: Final = timedelta(minutes=10)  # a handler that is unreachable is tried more often than that
_PAUSES: Final = Backoff(0.1, 5.0)  # between two tries
_NOTHING_IS_OLDER: Final = datetime(1, 1, 1, tzinfo=UTC)
# The planner does not know the lengths of the arrays; by its guess it would read the whole table for 1,000 messages.
_PLAN_BY_KEY: Final = {"enable_hashjoin": "off", "enable_mergejoin": "off", "enable_seqscan": "off"}


class Backlog(NamedTuple):
    """How many messages are neither processed nor dead, and since when (docs/contract/delivery.md#delivery-34)."""

    messages: int
    oldest_at: datetime | None


async def open_inbox_pool(url: str, *, name: str, connections: int) -> Pool:
    """Open a pool for `InboxMessages`, as `open_rooms` does; the caller closes it."""
    return await open_rooms(url, ROOM, name=name, connections=connections, settings=_PLAN_BY_KEY)


async def get_inbox_backlog(connection: Connection | Pool, consumer: str, subjects: Sequence[str]) -> Backlog:
    """Count those of a consumer of `subjects`; there may be others of its name, in other streams."""
    row = await connection.fetchrow(QUERIES["backlog"], consumer, [expression_of(subject) for subject in subjects])
    return Backlog(*row) if row is not None else Backlog(0, None)


class Begun(NamedTuple):
    """What a consumer has begun of a subject and not ended, and why its handler is unreachable, where it is.

    Calls of such a handler pause (docs/contract/delivery.md#delivery-37).
    """

    consumer: str
    subject: str
    messages: int
    error: str | None


async def find_begun(connection: Connection | Pool) -> list[Begun]:
    """Return what consumers have begun, webhooks among them, wherever they run, by consumer and subject."""
    return [Begun(*row) for row in await connection.fetch(QUERIES["begun"], NOBODY_THERE, _TRIED)]


class InboxMessages:
    """The rows of one consumer; any number of processes may work on them."""

    def __init__(self, pool: Pool, consumer: str, *, lease_seconds: float) -> None:
        self._waiting = 0  # queries that Postgres has not answered at the first try
        self.leases = Leases(self.renew, lease_seconds)
        self._pool = pool
        self.consumer = consumer
        self._lease_seconds = lease_seconds
        self._claims = PostgresClaims(_TABLE, _PARTS, self._fetch)
        self._claiming = Grouped(self._claim, _GROUP)
        self._settling = Grouped(self._claims.settle, _GROUP)

    @property
    def waiting_for_postgres(self) -> bool:
        """Whether a query waits out an outage of Postgres."""
        return self._waiting > 0

    async def claim(self, incoming: Incoming) -> State:
        """Record the message where it is new, and begin an attempt where none is under way; each claim counts one.

        So claim only what is attempted at once: a process that is killed uses up an attempt of all that it has claimed.
        """
        return await self._claiming(incoming)

    async def settle(self, claim: Claim, outcome: Outcome, *, counts: bool = True) -> bool:
        """End an attempt, or take back one that does not count; False, with nothing settled, after its lease's end."""
        return await self._settling(Ended(claim.key, claim.owner, outcome, counts))

    async def renew(self, claims: Sequence[Claim]) -> list[Claim]:
        """Prolong leases; return those that still held."""
        return await renewed(self._claims, claims, self._lease_seconds)

    async def _claim(self, messages: Sequence[Incoming]) -> list[State]:
        rows = [
            (each.source_context, each.message_id, self.consumer, each.delivery.subject, each.causation_id)
            for each in messages
        ]
        return await self._claims.claim(rows, str(uuid4()), self._lease_seconds)

    async def _fetch(self, query: str, *values: Any) -> tuple[list[asyncpg.Record], float]:
        """Run a query until Postgres has answered; raises its error for values that it refuses."""
        failures = 0
        try:
            while True:
                started = time.monotonic()
                try:
                    return await self._pool.fetch(query, *values), started
                except REFUSED:
                    raise
                except POSTGRES_ERRORS as error:
                    if self._pool.is_closing():
                        raise  # the program stops, and waits no longer
                    tried = f"{type(error).__name__}: {error}"
                    _log.warning("postgres_waited_for", consumer=self.consumer, error=tried)
                    self._waiting += failures == 0
                    failures += 1
                    await asyncio.sleep(_PAUSES.seconds(failures))
        finally:
            self._waiting -= failures > 0


class InboxRetention:
    """Sweeps the rows of the consumer `durable` of `stream`, once they cannot come again: `run` it as a task.

    A message can come again for as long as its stream holds it (a consumer may be created again, or have been killed
    before it acknowledged), and for as long as a worker publishes what streams have lost (its `record.horizon_days`).
    So a row is deleted when it is older than both, and ended `keep_days` ago by a clock of Postgres that is not in
    doubt. Rows of messages that are waiting stay. A sweep goes in slices, and rests after each four times as long as it
    took; any number of processes may sweep.
    """

    def __init__(self, pool: Pool, js: JetStreamContext, *, stream: str, durable: str, settings: InboxSettings) -> None:
        self.swept = 0
        self._pool = pool
        self._js = js
        self._stream = stream
        self._durable = durable
        self._settings = settings
        self._clock = DatabaseClock()

    async def run(self) -> None:
        """Sweep until cancelled; an outage of Postgres or NATS ends one sweep only."""
        while True:
            try:
                await self.sweep()
            except (*POSTGRES_ERRORS, *NATS_ERRORS) as error:
                why = why_passing(error, f"looking at {self._stream}")
                _log.warning("inbox_sweep_failed", consumer=self._durable, error=why)
            end_if_cancelled()
            await asyncio.sleep(self._settings.sweep_interval_seconds)

    async def sweep(self) -> int:
        """Delete what cannot come again, slice by slice; return how many rows that were."""
        oldest = await self._oldest()
        swept, rows = 0, self._settings.sweep_rows
        while True:
            if not await self._clock.is_confirmed(self._pool):
                return swept
            started = time.monotonic()
            keep = timedelta(days=self._settings.keep_days)
            deleted = await count_changed(self._pool, QUERIES["sweep"], self._durable, keep, oldest, rows)
            swept, self.swept = swept + deleted, self.swept + deleted
            if deleted < rows:
                return swept
            await rest_since(started)

    async def _oldest(self) -> datetime | None:
        """Return when the oldest message of the stream was stored, by any clock; None where the stream is empty."""
        with suppress(NotFoundError):  # no such stream, or its first message was just deleted: the next sweep sees it
            info = await self._js.stream_info(self._stream)
            if not info.state.messages:
                return None
            first = await self._js.get_msg(self._stream, info.state.first_seq)
            return datetime.fromisoformat(str(first.time)) - CLOCK_SKEW
        return _NOTHING_IS_OLDER
