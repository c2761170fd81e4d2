"""The queries of accepting: B0, the look-up, and B2 with B3, the write. No rule is decided here.

The write is one statement and so one transaction, without a round trip inside. A large batch is several statements, so
that encoding it does not block the event loop, in one transaction too: it is in the tables whole or not at all.

A `broker_message_id` is a ULID, minted in the order in which this process accepts: ids in time order keep every index
append-only. Within a millisecond, and while the clock goes back, the next id is the last one plus one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from itertools import accumulate, groupby
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

import asyncpg
import ulid
from asyncpg.pgproto.pgproto import UUID

from broker.authentication import Member
from broker.config import RetentionConfig, dedupe_life
from broker.database import QUERIES, Database
from broker.items import Checked, Item, event
from broker.shares import Slices
from postroom._wire.ids import now_ms
from postroom._wire.message import DestinationKind
from postroom.chassis.postgres import Connection
from postroom.delivery.publication.postgres import DELIVERIES, EVENTS
from postroom.delivery.subjects import sent_subject

_WRITES_PER_MESH: Final = 2  # one waits for its commit, one works; more would only occupy connections
# For a turn, then for a connection: longer than they take under load, shorter than a daemon's patience.
_WAIT_SECONDS: Final = 10.0
# The sources whose publishers have to be woken for a message.
_SOURCES: Final[dict[DestinationKind, tuple[str, ...]]] = {
    "topic": (EVENTS.name, DELIVERIES.name),
    "queue": (EVENTS.name,),
    "dm": (DELIVERIES.name,),
}
_TIME_BYTES: Final = 6
_RANDOM_BYTES: Final = 10
_AT_ONCE_BYTES: Final = 4 * 1024 * 1024  # of values that go out in one statement: as many as a relay posts
_PART_BYTES: Final = 1024 * 1024  # of those of a larger batch: about 1 ms to encode


class Candidate(NamedTuple):
    """A message that passed B1: the values of its rows."""

    item: Item
    checked: Checked


class Entry(NamedTuple):
    """A candidate with the id that it gets, and the payload of its event, None for a dm."""

    candidate: Candidate
    broker_message_id: UUID
    event: str | None


class Taken(NamedTuple):
    """The dedupe row that holds an id."""

    sender_id: int
    broker_message_id: UUID
    history_id: int
    request_fingerprint: bytes
    first_seen_at: datetime
    history_available: bool


class Written(NamedTuple):
    """What the write made of one candidate: accepted under `history_id`, refused by its destination, or neither.

    Neither means that another batch, or a candidate before it, took the id first: look it up.
    """

    candidate: Candidate
    broker_message_id: UUID
    history_id: int | None
    refusal: str | None


class TokenRevoked(Exception):
    """The sender's token stopped being valid between the request and the transaction; nothing was written."""


class Unwanted(Exception):
    """The caller gave up before the transaction; nothing was written."""


async def find_taken(connection: Connection, mesh_id: int, ids: Iterable[str]) -> dict[str, Taken]:
    """Return the dedupe rows that hold these ids, by id."""
    return {row[0]: Taken(*row[1:]) for row in await connection.fetch(QUERIES["find_accepted"], mesh_id, list(ids))}


Wanted = Callable[[], bool]
"""Whether the caller still waits for the answer. A batch without a waiting caller is not written: its sender posts it
again, or asks whether it was accepted, and a "no" must stay true."""


class AcceptStore:
    """The accept transaction and its look-up, on the accepting pool."""

    def __init__(self, database: Database, retention: RetentionConfig, ids: MessageIds) -> None:
        self.slices = Slices()
        self._database = database
        self._pool = database.accepting
        self._ids = ids
        self._message_life = timedelta(days=retention.message_days)
        self._dedupe_life = dedupe_life(retention)
        self._turns: WeakValueDictionary[int, asyncio.Semaphore] = WeakValueDictionary()

    async def find(self, mesh_id: int, client_message_ids: Iterable[str]) -> dict[str, Taken]:
        """Return the dedupe rows that hold these ids, by id; `TimeoutError` where no connection becomes free."""
        async with self._pool.acquire(timeout=_WAIT_SECONDS) as connection:
            return await find_taken(connection, mesh_id, client_message_ids)

    async def write(
        self, sender: Member, candidates: Sequence[Candidate], wanted: Wanted = lambda: True
    ) -> list[Written]:
        """Commit what can be accepted of `candidates`, in their order; one transaction, all of it or nothing.

        Raises `Unwanted` and `TokenRevoked`; after any other error the outcome is unknown.
        """
        minted = self._ids.mint(len(candidates))
        announced: list[str | None] = []

        def announce(numbered: tuple[int, Candidate]) -> None:
            index, (item, checked) = numbered
            announced.append(event(item, checked, str(minted[index]), sender.mesh, sender.name))

        await self.slices.each(sender.whose, enumerate(candidates), announce)
        parts = _parts(list(map(Entry, candidates, minted, announced)))
        async with self._turn(sender.mesh_id), self._pool.acquire(timeout=_WAIT_SECONDS) as connection:
            if not wanted():
                raise Unwanted
            try:
                written = await self._write_all(connection, sender, parts)
            except (asyncpg.InsufficientResourcesError, asyncpg.InsufficientPrivilegeError) as error:
                self._database.lack = str(error).partition("\n")[0]
                raise
        self._database.lack = None
        self._database.ring(
            source for candidate in candidates for source in _SOURCES[candidate.checked.destination_kind]
        )
        return written

    async def _write_all(
        self, connection: Connection, sender: Member, parts: Sequence[Sequence[Entry]]
    ) -> list[Written]:
        if len(parts) == 1:
            return await self._write(connection, sender, parts[0])
        written: list[Written] = []
        async with connection.transaction():
            await connection.execute(QUERIES["accept_alone"], sender.mesh_id)
            last = await connection.fetchval(QUERIES["take_history_ids"], sender.mesh_id, sum(map(len, parts)))
            if last is None:  # the mesh was deleted, and its members' tokens with it
                raise TokenRevoked
            for part in parts:
                written += await self._write(connection, sender, part, last)
                last += len(part)
        return written

    async def _write(
        self, connection: Connection, sender: Member, entries: Sequence[Entry], last: int | None = None
    ) -> list[Written]:
        """Write what `entries` have: under the numbers after `last`, or under some that are taken now."""
        rows = await connection.fetch(QUERIES["accept"], *self.values(sender, entries), last)
        if not rows:
            raise TokenRevoked
        verdicts = {position: (history_id, refusal) for position, history_id, refusal in rows}
        return [Written(entry.candidate, entry.broker_message_id, *verdicts[at]) for at, entry in enumerate(entries)]

    @asynccontextmanager
    async def _turn(self, mesh_id: int) -> AsyncIterator[None]:
        """Wait until fewer than `_WRITES_PER_MESH` writes of a mesh are under way; `TimeoutError` where they hang."""
        turn = self._turns.setdefault(mesh_id, asyncio.Semaphore(_WRITES_PER_MESH))
        async with asyncio.timeout(_WAIT_SECONDS):
            await turn.acquire()
        try:
            yield
        finally:
            turn.release()

    def values(self, sender: Member, entries: Sequence[Entry]) -> tuple[Any, ...]:
        """Return the statement's parameters: scalars, then a column per field, the mentions, the mesh, the subjects."""
        items = [entry.candidate.item for entry in entries]
        checked = [entry.candidate.checked for entry in entries]
        mentions = [(index + 1, name) for index, values in enumerate(checked) for name in values.mentions]
        return (
            sender.mesh_id,
            sender.member_id,
            sender.token_sha256,
            self._message_life,
            self._dedupe_life,
            [entry.broker_message_id for entry in entries],
            [item.client_message_id for item in items],
            [item.fingerprint for item in items],
            [values.destination_kind for values in checked],
            [values.destination_ref for values in checked],
            [values.priority for values in checked],
            [values.reply_to for values in checked],
            [values.traceparent for values in checked],
            [values.meta for values in checked],
            [values.body for values in checked],
            [values.body_is_text for values in checked],
            [entry.event for entry in entries],
            [values.event_version for values in checked],
            [values.correlation_id for values in checked],
            [values.causation_id for values in checked],
            [position for position, _ in mentions],
            [name for _, name in mentions],
            sender.mesh,
            [
                sent_subject(sender.mesh, values.destination_kind, values.destination_ref, values.event_version)
                for values in checked
            ],
        )


def _parts(entries: Sequence[Entry]) -> list[Sequence[Entry]]:
    sizes = [len(checked.body) + len(checked.meta or "") + len(payload or "") for (_, checked), _, payload in entries]
    if sum(sizes) <= _AT_ONCE_BYTES:
        return [entries]
    parts = groupby(zip(entries, accumulate(sizes), strict=True), lambda sized: sized[1] // _PART_BYTES)
    return [[entry for entry, _ in part] for _, part in parts]


class MessageIds:
    """Mints ids; each is greater than the one before. Clock and randomness are injected."""

    def __init__(self, clock: Callable[[], int] = now_ms, randomness: Callable[[int], bytes] = os.urandom) -> None:
        self._clock = clock
        self._randomness = randomness
        self._last = 0

    def mint(self, count: int) -> list[UUID]:
        """Return `count` ids in ascending order."""
        fresh = ulid.from_bytes(self._clock().to_bytes(_TIME_BYTES, "big") + self._randomness(_RANDOM_BYTES))
        first = max(fresh.int, self._last + 1)
        self._last = first + count
        return [UUID(number.to_bytes(_TIME_BYTES + _RANDOM_BYTES, "big")) for number in range(first, first + count)]
