"""The event store of one agent: what came in, what went out because of it, and which of that is published.

A store of the chassis, written by one process at a time: every method runs in a turn (turns.py), which also keeps one
process from writing while another moves the write-ahead log into the file (sdk/postroom/chassis/sqlite.py).

Of each event it keeps a record in canonical JSON (RFC 8785), `{"cause":…,"envelope":{…},"role":"…","subject":"…"}`, and
a chain of hashes over them. The state hash after position n is

    sha256( state hash after n - 1  ‖  record n )          with 32 zero bytes before position 1

so it depends on every byte of every record and on their order, and on nothing else: not on deliveries, batches or the
times of runs (docs/contract/delivery.md#delivery-60).
"""

import asyncio
import hashlib
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

import msgspec
import rfc8785
import structlog

from postroom._wire.arguments import to_json
from postroom._wire.canonical import decode
from postroom._wire.canonical import encode as encode_canonically
from postroom._wire.sql import load_queries
from postroom._wire.words import counted, value_fault
from postroom.agent import Envelope
from postroom.chassis import store
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.sqlite import Schema, exit_after, is_full
from postroom.delivery.agents.envelopes import to_microseconds
from postroom.delivery.publication import Placed, Search
from postroom.errors import InvalidMessage

_log = structlog.get_logger(__name__)

SCHEMA: Final = Schema.of("postroom.delivery.agents", "PSAE")
QUERIES: Final = load_queries("postroom.delivery.agents")
NO_HASH: Final = bytes(32)  # the state hash of an empty store
_EVENT_BYTES: Final = 512  # about what an event adds to the file in addition to its record
_DISK_PAUSE: Final = 1.0  # seconds between two tries to commit on a full disk
_PAGE: Final = 1000  # events read at once
_ATTEMPTS_KEPT: Final = 30 * 86_400_000  # ms since the last one

Key = tuple[str, str, str]  # idempotency key, workspace, tenant
Role = Literal["handled", "conflict", "refused", "emitted", "reported"]
T = TypeVar("T")


class Record(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One event of the store; the fields are in canonical order.

    `handled`, `conflict` and `refused` say what became of a message that came in. `emitted` (by the agent) and
    `reported` (by the runtime) events were caused by the message at the position `cause`.
    """

    cause: int | None
    envelope: Envelope
    role: Role
    subject: str

    @property
    def changes_state(self) -> bool:
        """Whether `apply` sees the event: what was handled, and what the agent emitted."""
        return self.role in ("handled", "emitted")


class _Payload(msgspec.Struct):
    payload: msgspec.Raw


class _Body(msgspec.Struct):
    envelope: _Payload


_decode_payload: Final = msgspec.json.Decoder(_Body).decode
_encode: Final = msgspec.json.Encoder().encode
decode_record: Final = msgspec.json.Decoder(Record).decode  # raises `msgspec.DecodeError` for an invalid one
_decode_any: Final = msgspec.json.Decoder().decode


def canonical(value: Any, what: str) -> bytes:
    """Return the canonical JSON of a payload; raises `InvalidMessage` where JSON cannot hold it."""
    try:
        return encode_canonically(decode(to_json(value).decode()))
    except (rfc8785.CanonicalizationError, msgspec.DecodeError, TypeError, ValueError, RecursionError) as error:
        detail = f"{what} is not JSON: {value_fault(error)}"
        raise InvalidMessage.of("invalid_payload", detail, field="payload") from error


def with_payload(envelope: Envelope, value: Any) -> tuple[Envelope, bytes]:
    """Return the envelope with the payload as a replay would read it, and that payload's canonical JSON."""
    payload = canonical(value, f"the payload of {envelope.type or envelope.id!r}")
    return msgspec.structs.replace(envelope, payload=_decode_any(payload)), payload


def encode_record(record: Record, payload: bytes) -> bytes:
    """Return the canonical JSON of a record, whose payload is encoded already."""
    envelope = msgspec.structs.replace(record.envelope, payload=msgspec.Raw(payload))
    return _encode(msgspec.structs.replace(record, envelope=envelope))


def payload_of(record: bytes) -> bytes:
    """Return the payload of a record, byte for byte: what is published again is what was published."""
    return bytes(_decode_payload(record).envelope.payload)


def next_hash(previous: bytes, record: bytes) -> bytes:
    """Return the state hash after `record`."""
    return hashlib.sha256(previous + record).digest()


class Owner(NamedTuple):
    """Whose store it is."""

    agent: str
    tenant: str
    workspace: str


class Head(NamedTuple):
    """The end of a store: its last position, the state hash after it, and the latest time of any event."""

    position: int
    state_hash: bytes
    logical_clock: int  # µs since the epoch


class Event(NamedTuple):
    """One event as it is stored."""

    position: int
    record: bytes
    state_hash: bytes


class Stored(NamedTuple):
    """A stored message, or a dead letter, that is not marked published."""

    position: int
    epoch: int  # how often it was lost
    record: bytes
    subject: str | None  # of a letter; a message's is in its record


class Mark(NamedTuple):
    """Where JetStream has a message: a number in a stream, and when that was created (µs since the epoch)."""

    position: int
    epoch: int
    now: int  # ms since the epoch
    stream: str
    created_at: int
    sequence: int


class Attempt(NamedTuple):
    """A failed attempt at a message: which one it was, and why it failed."""

    message_id: str
    number: int  # 1: the first
    error: str
    failed_at: int  # ms since the epoch


class Tried(NamedTuple):
    """How many attempts at a message failed, and why the last one did."""

    attempts: int
    last_error: str


class Changes(NamedTuple):
    """What one transaction adds to the store."""

    events: Sequence[Event]
    versions: Mapping[str, int]  # of entities
    logical_clock: int  # after the events
    failed: Sequence[Attempt]
    handled: Sequence[str]  # ids of messages whose failed attempts are over

    @property
    def none(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.events or self.failed or self.handled)


class TurnInput(NamedTuple):
    """What a turn needs: the head, the events since the last turn, known messages, and earlier attempts."""

    head: Head
    news: list[Event]
    found: dict[int, tuple[int, Role]]  # by the index of the key: its position, and what became of it
    versions: dict[str, int]
    tried: dict[str, Tried]  # by message id


class Store:
    """The open event store; any number of processes of one host may have it open."""

    def __init__(self, file: store.Store) -> None:
        self._file = file

    @classmethod
    async def open(cls, path: Path, owner: Owner, *, was_opened: bool = False) -> Self:
        """Open, migrate and claim the file, in a turn.

        Raises `Fatal`: 78 where it is damaged, also one that `was_opened` before and was emptied, newer than the
        program, or another agent's, 75 or 74 where the disk is full or fails.
        """
        claim = partial(_claim, path, owner)
        opening = store.Store.open(path, SCHEMA, _ANSWERS, prepare=claim, damaged=_damaged, was_opened=was_opened)
        return cls(await opening)

    @property
    def trouble(self) -> str | None:
        """Return why nothing can be written now."""
        return "the disk of the event store is full: free some space" if self._file.disk_full else None

    async def close(self) -> None:
        """Close the file, in a turn."""
        await self._file.close()

    async def run(self, read: Callable[[sqlite3.Connection], T]) -> T:
        """Call a function that reads on the connection's thread; return what it returns."""
        return await self._file.run(read)

    async def read_turn(
        self, keys: Sequence[Key], entities: Sequence[str], message_ids: Sequence[str], after: int
    ) -> TurnInput:
        """Read in one step what a turn needs that knows everything up to the position `after`."""

        def read(db: sqlite3.Connection) -> TurnInput:
            head = read_head(db)
            return TurnInput(
                head,
                list(read_events(db, after)) if head.position > after else [],
                {index: (position, role) for index, position, role in _among(db, "find", keys)},
                dict(_among(db, "versions", entities)),
                {message_id: Tried(*tried) for message_id, *tried in _among(db, "attempts", message_ids)},
            )

        return await self._file.run(read)

    async def append(self, changes: Changes) -> None:
        """Commit events, the versions and the position that follow from them, and attempts: all or nothing."""
        size = sum(len(event.record) + _EVENT_BYTES for event in changes.events)
        await self._file.write(partial(_append, changes), size)

    async def unpublished_of(self, causes: Sequence[int]) -> list[Stored]:
        """Return what the messages at these positions caused, as far as it is not marked published."""
        return await self._file.run(lambda db: _outgoing(db, "unpublished_of", (_encode(causes).decode(),)))

    async def unpublished(self) -> list[Stored]:
        """Return everything that is not marked published, oldest first."""
        return await self._file.run(lambda db: _outgoing(db, "unpublished", ()))

    async def mark_published(self, marks: Sequence[Mark]) -> int:
        """Note where JetStream has messages; return how many are to be published again.

        These are any two messages with the same place: the stream has lost one of the two.
        """
        values = [mark._asdict() for mark in marks]

        def work(db: sqlite3.Connection) -> int:
            db.executemany(QUERIES["mark_published"], values)
            return db.executemany(QUERIES["requeue_displaced"], values).rowcount

        return await self._file.write(work, _EVENT_BYTES * len(marks))

    async def keep_letter(self, letter_id: str, subject: str, record: bytes) -> Stored | None:
        """Commit a dead letter, unless it is known; return it where it is not marked published."""

        def work(db: sqlite3.Connection) -> Stored | None:
            db.execute(QUERIES["keep_letter"], (letter_id, subject, record))
            row = db.execute(QUERIES["find_letter"], (letter_id,)).fetchone()
            return row and Stored(*row)

        return await self._file.write(work, len(record) + _EVENT_BYTES)

    async def requeue_lost(self, search: Search) -> int:
        """Make unpublished what a stream has lost; return how many messages that are."""
        found = await self._file.run(partial(_find_lost, search))
        if not any(found):
            return 0
        return await self._file.write(partial(_requeue, *found), _EVENT_BYTES * sum(map(len, found)))

    async def newest_at(
        self, stream: str, created_at: int, first: int, last: int, missing: Sequence[int]
    ) -> Placed | None:
        """Return the message with the highest number in a range, without `missing`; `created_at` as in `Mark`."""
        values = stream, created_at, first, last, _encode(missing).decode()
        row = await self._file.run(lambda db: db.execute(QUERIES["newest_at"], values).fetchone())
        return row and Placed(*row)

    async def has_place(self, stream: str, created_at: int) -> bool:
        """Return whether any message has a place in a stream; `created_at` as in `Mark`."""
        place = stream, created_at
        return await self._file.run(lambda db: bool(db.execute(QUERIES["has_place"], place).fetchone()[0]))

    async def forget_places(self, stream: str, created_at: int, numbers: Sequence[int]) -> None:
        """Forget these places in a stream: their messages left it, as they should."""
        values = stream, created_at, _encode(numbers).decode()
        size = _EVENT_BYTES * len(numbers)
        await self._file.write(lambda db: db.execute(QUERIES["forget_places"], values).rowcount, size)

    async def requeue(self, positions: Sequence[int]) -> int:
        """Make these messages unpublished; return how many of them were published."""
        return await self._file.write(partial(_requeue, positions, []), _EVENT_BYTES * len(positions))

    async def requeue_since(self, since: int, *, now: int, actor: str, reason: str) -> int:
        """Make unpublished what was published from a time on, and log who did it, and why; return how many that were.

        Times are ms since the epoch.
        """
        found = await self.published_since(since)
        entry = now, actor, "republish", f"{counted(len(found), 'message')} published since {since}", reason

        def work(db: sqlite3.Connection) -> int:
            db.execute(QUERIES["log_operation"], entry)
            return _requeue(found, [], db)

        return await self._file.write(work, _EVENT_BYTES * len(found))

    async def published_since(self, since: int) -> list[int]:
        """Return the positions of what was published from a time on (ms since the epoch)."""
        return await self._file.run(lambda db: [row[0] for row in db.execute(QUERIES["find_since"], (since,))])

    async def prune(self, before: int, most: int) -> int:
        """Forget where up to `most` messages went that were published before a time, and delete such letters.

        The time is in ms since the epoch. Returns how many messages; their events stay.
        """

        def work(db: sqlite3.Connection) -> int:
            db.execute(QUERIES["prune_letters"], (before,))
            return db.execute(QUERIES["prune"], {"before": before, "most": most}).rowcount

        return await self._file.write(work, _EVENT_BYTES * most)

    async def lost(self, after: int, most: int) -> list[Stored]:
        """Return what was lost and is not published again yet, after a position, oldest first."""
        return await self._file.run(lambda db: _outgoing(db, "lost", (after, most)))


def read_events(db: sqlite3.Connection, after: int = 0) -> Iterator[Event]:
    """Read every event after a position, a page at a time."""
    while page := db.execute(QUERIES["read"], (after, _PAGE)).fetchall():
        for position, record, state_hash in page:
            yield Event(position, record, state_hash)
        after = page[-1][0]


def read_head(db: sqlite3.Connection) -> Head:
    """Read the end of the store."""
    return Head(*db.execute(QUERIES["head"]).fetchone())


def read_owner(db: sqlite3.Connection) -> Owner | None:
    """Read whose store it is; None where no agent has claimed it."""
    row = db.execute(QUERIES["owner"]).fetchone()
    return row and Owner(*row)


def _claim(path: Path, owner: Owner, db: sqlite3.Connection) -> None:
    found = read_owner(db)
    if found is None:
        db.execute(QUERIES["claim"], owner)
    elif found != owner:
        theirs, ours = (f"{of.agent} in {of.tenant}/{of.workspace}" for of in (found, owner))
        whose = f"{path} is the store of the agent {theirs}, not of {ours}"
        raise Fatal(Exit.CONFIG, f"{whose}: give each agent a state directory of its own")


def _among(db: sqlite3.Connection, query: str, wanted: Sequence[object]) -> list[tuple[Any, ...]]:
    return db.execute(QUERIES[query], (_encode(wanted).decode(),)).fetchall() if wanted else []


def _append(changes: Changes, db: sqlite3.Connection) -> None:
    if changes.events:
        rows = [(event.position, event.record.decode(), event.state_hash) for event in changes.events]
        db.executemany(QUERIES["append"], rows)
        last = changes.events[-1]
        db.execute(QUERIES["advance"], (last.position, last.state_hash, changes.logical_clock))
    if changes.versions:
        db.executemany(QUERIES["count_change"], changes.versions.items())
    if changes.failed:
        db.executemany(QUERIES["count_attempt"], changes.failed)
        db.execute(QUERIES["forget_old_attempts"], (changes.failed[-1].failed_at - _ATTEMPTS_KEPT,))
    if changes.handled:
        db.execute(QUERIES["forget_attempts"], (_encode(changes.handled).decode(),))


def _find_lost(search: Search, db: sqlite3.Connection) -> tuple[list[int], list[int]]:
    """Return the positions of what is lost, and of what went by age."""
    lost: list[int] = []
    old: list[int] = []
    created_at, since, until = map(to_microseconds, (search.created_at, search.since, search.until))
    values = {"stream": search.stream, "created_at": created_at, "number": search.bound, "until": until // 1000}
    for position, published_at in db.execute(QUERIES[f"find_{search.loss}"], values):
        (lost if published_at > since // 1000 else old).append(position)
    return lost, old


def _requeue(lost: Sequence[int], old: Sequence[int], db: sqlite3.Connection) -> int:
    db.execute(QUERIES["forget_place"], (_encode(old).decode(),))
    return db.execute(QUERIES["requeue"], (_encode(lost).decode(),)).rowcount


def _outgoing(db: sqlite3.Connection, query: str, parameters: tuple[str | int, ...]) -> list[Stored]:
    return [Stored(*row) for row in db.execute(QUERIES[query], parameters)]


def _damaged(path: Path, fault: str) -> None:
    raise Fatal(Exit.CONFIG, f"{path} is damaged ({fault}): restore a copy, or move its files elsewhere to start empty")


def _failed(error: Exception) -> Fatal:
    code = exit_after(error) if isinstance(error, (sqlite3.Error, OSError)) else Exit.FAILED
    return Fatal(code, f"writing the event store failed: {error}; check the disk")


_ANSWERS: Final = store.Answers(
    refused=lambda error: error,  # a full disk, which is waited out
    unknown=lambda _, error: _failed(error),
    closed=lambda: Fatal(Exit.FAILED, "the event store is closed"),
)


async def durably(write: Callable[[], Awaitable[T]]) -> T:
    """Call `write` until the disk has room: a full disk left nothing written, so nothing else has to run again.

    Raises `Fatal` (74) where the disk fails.
    """
    while True:
        try:
            return await write()
        except sqlite3.Error as error:
            if not is_full(error):
                raise _failed(error) from error
            _log.error("disk_full", advice="free some space: the agent waits")
            await asyncio.sleep(_DISK_PAUSE)
