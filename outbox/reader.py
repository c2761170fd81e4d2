"""Reading the outbox while it is written: read-only, one short transaction at a time, so that the WAL can be emptied.

And waiting until a row settles.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from outbox.errors import row_not_found
from outbox.model import ClaimedRow, Comparison, DoneRow, Missing, OutboxCounts, RelayControl, Unanswered
from outbox.relay import Own, read_claimed
from outbox.settled import find_moved, find_row, find_rows, read_salt, text_of, unpack
from postroom._wire.moment import from_milliseconds
from postroom._wire.nouns import LogLine, LogPage, LogQuery, invalid_cursor
from postroom._wire.operations import VERBS, RowFilter
from postroom._wire.sends import EndedRow, FailedPosts, OperatorAction, OutboxPage, OutboxRow, RowChain
from postroom._wire.sql import load_queries
from postroom.chassis import sqlite
from postroom.chassis.store import Store

_QUERIES: Final = load_queries("outbox", "sql/reader.sql")
_COMPARING: Final = load_queries("outbox", "sql/comparison.sql")
_CURSOR_DIGITS: Final = 18  # fewer than a 64-bit integer may have
MAX_SEQ: Final = 2**63 - 1
PAGE_ROWS: Final = 100
_SCAN: Final = 500  # rows that one short read transaction examines, and rows of a page of `pages`
_COMPARED_AT_ONCE: Final = 500  # rows
_SCANS_PER_PAGE: Final = 200  # after which a page is returned as full as it is, with a cursor
_WALKS: Final = {"pending": "walk_pending", "inflight": "walk_status", "dead": "walk_status"}
T = TypeVar("T")


_IDS: Final = ("id", "client_message_id", "broker_message_id", "superseded_by")
_decode_row: Final = msgspec.json.Decoder(OutboxRow, strict=False).decode  # times are seconds, and truths are 0 or 1
_decode_rows: Final = msgspec.json.Decoder(list[OutboxRow], strict=False).decode
_decode_page: Final = msgspec.json.Decoder(list[tuple[int, OutboxRow]], strict=False).decode
_decode_ids: Final = msgspec.json.Decoder(list[str]).decode
_decode_seqs: Final = msgspec.json.Decoder(list[int]).decode
_encode: Final = msgspec.json.Encoder().encode


class Reader:
    """Reads rows; `clock` returns ms since the epoch."""

    def __init__(self, store: Store, clock: Callable[[], int]) -> None:
        self._store = store
        self._clock = clock

    async def _read(self, read: Callable[..., T], *arguments: Any) -> T:
        """Call `read` with the connection and `arguments`: all its queries see the same rows."""
        return await self._store.read(lambda db: sqlite.in_snapshot(db, lambda: read(db, *arguments)))

    async def find_all(self, client_message_ids: Collection[str]) -> list[OutboxRow]:
        """Return the rows of these sends, in any order, without one for an id that is free."""
        ids = list(client_message_ids)

        def read(db: sqlite3.Connection) -> list[OutboxRow]:
            moved = list(find_moved(db, ids, read_salt(db)).values())
            parameters = (_encode(ids).decode(), _encode(moved).decode())
            return [_shown(row) for row in _decode_rows(_value(db, "rows_by_client_message_id", parameters))]

        return await self._read(read)

    async def settled_of(self, row_ids: Sequence[str]) -> list[str]:
        """Return those of the rows that are done, dead or aborted."""
        ids = _encode(row_ids).decode()
        return _decode_ids(await self._store.read(lambda db: _value(db, "settled_of", (ids,))))

    async def row(self, row_id: str) -> OutboxRow:
        """Return a row by its id, else by its client_message_id; raises `NotFound`."""
        return await self._read(_row, row_id)

    async def inspect(self, row_id: str) -> RowChain:
        """Return a row (by its id, else by its client_message_id) with its requeue chain and its log; 404."""

        def read(db: sqlite3.Connection) -> RowChain:
            row = _row(db, row_id)
            chain = [row]
            while found := db.execute(
                _QUERIES["predecessor"], {"id": chain[0].id, "seq": find_row(db, chain[0].id)}
            ).fetchone():
                chain.insert(0, _stored(db, found[0]))
            while (after := chain[-1].superseded_by) is not None and (seq := find_row(db, after)) is not None:
                chain.append(_stored(db, seq))
            return _with_log(db, row, chain)

        return await self._read(read)

    async def operations(self, query: LogQuery) -> LogPage:
        """Return what operators did to this outbox and its relay, the latest first."""
        since = int(query.earliest(from_milliseconds(self._clock())).timestamp() * 1000)
        wanted = {**msgspec.structs.asdict(query), "since": since, "limit": query.limit + 1}
        rows = await self._read(lambda db: db.execute(_QUERIES["operations"], wanted).fetchall())
        lines = []
        for _, at, verb, actor, reason, row_id, detail, noun in rows[: query.limit]:
            done = VERBS[verb].done if verb in VERBS else "done"
            outcome = done if detail is None else f"{done}: {detail}"
            moment = from_milliseconds(at)
            line = LogLine(
                at=moment, actor=actor, verb=verb, noun=noun, key=row_id or "", outcome=outcome, reason=reason
            )
            lines.append(line)
        return LogPage(lines=lines, next_cursor=rows[-2][0] if len(rows) > query.limit else None)

    async def unreported(self, limit: int) -> tuple[list[int], list[EndedRow]]:
        """Return the numbers and the rows of the next ends to report to the broker, the oldest first."""

        def read(db: sqlite3.Connection) -> tuple[list[int], list[EndedRow]]:
            found = db.execute(_QUERIES["unreported"], (limit,)).fetchall()
            rows = []
            for _, seq in found:
                row = _stored(db, seq)
                after = None if row.superseded_by is None else find_row(db, row.superseded_by)
                successor = None if after is None else _stored(db, after).client_message_id
                chain = _with_log(db, row, [row])
                rows.append(EndedRow(row=row, log=chain.log, failed_posts=chain.failed_posts, successor=successor))
            return [number for number, _ in found], rows

        return await self._read(read)

    async def last_seq(self) -> int:
        """Return the `seq` of the youngest row, 0 for an empty outbox."""
        return await self._store.read(lambda db: int(_value(db, "last_seq", ())))

    async def list_rows(self, row_filter: RowFilter, cursor: str | None = None, limit: int = PAGE_ROWS) -> OutboxPage:
        """Return up to `limit` matching rows in age order, never payloads.

        A page may be shorter, even empty, and still have a `next_cursor`: where the filter matches little, the search
        goes on with the next call, so that no call takes long.
        """
        return await self._page(row_filter, cursor, limit, self._clock(), MAX_SEQ)

    async def _page(self, row_filter: RowFilter, cursor: str | None, limit: int, now: int, until: int) -> OutboxPage:
        after: int | None = seq_of(cursor)
        rows: list[OutboxRow] = []
        latest = row_filter.latest(from_milliseconds(now))
        parameters = {
            "until": until,
            "scan": _SCAN,
            "status": row_filter.status,
            "destination": row_filter.destination,
            "held": row_filter.held,
            "code": row_filter.code,
            "enqueued_before": None if latest is None else round(latest.timestamp() * 1000),
        }
        for _ in range(_SCANS_PER_PAGE):
            step = {**parameters, "after": after or 0, "limit": limit - len(rows)}
            found, after = await self._read(_walk, row_filter, step)
            rows += found
            if after is None or len(rows) == limit:
                break
        return OutboxPage(rows=rows, next_cursor=None if after is None else str(after))

    async def pages(
        self, row_filter: RowFilter, cursor: str | None = None, until: int = MAX_SEQ
    ) -> AsyncIterator[OutboxPage]:
        """Yield each page of the matching rows in age order, after `cursor` and up to the row `until`."""
        now = self._clock()
        while True:
            page = await self._page(row_filter, cursor, _SCAN, now, until)
            yield page
            if (cursor := page.next_cursor) is None:
                return

    async def unanswered(self, row_ids: Sequence[str]) -> list[Unanswered]:
        """Return those of the rows, pending or dead, that the broker was sent and did not answer for."""
        found = await self._store.read(
            lambda db: db.execute(_QUERIES["unanswered"], (_encode(row_ids).decode(),)).fetchall()
        )
        return [Unanswered(*each) for each in found]

    async def comparison(self) -> Comparison | None:
        """Return how far the done rows were compared with the broker's database; None where they never were."""
        found = await self._store.read(lambda db: db.execute(_COMPARING["comparison"]).fetchone())
        return None if found is None else Comparison(*found)

    async def last_history_id(self) -> int:
        """Return the number that the broker gave the last done row, 0 without one."""
        return await self._store.read(lambda db: int(db.execute(_COMPARING["last_history_id"]).fetchone()[0]))

    async def stretch(self, comparison: Comparison) -> tuple[list[DoneRow], int]:
        """Return the next rows to compare, and up to which row that goes."""
        values = {**comparison._asdict(), "scan": _COMPARED_AT_ONCE}
        rows = await self._store.read(lambda db: db.execute(_COMPARING["stretch"], values).fetchall())
        last = rows[-1][0] if len(rows) == _COMPARED_AT_ONCE else comparison.until
        return [DoneRow(seq, text_of(name), fingerprint) for seq, name, fingerprint, wanted in rows if wanted], last

    async def missing(self) -> Missing:
        """Count the done rows that the broker's database lost."""
        return Missing(*await self._store.read(lambda db: db.execute(_COMPARING["missing"]).fetchone()))

    async def claimed(self, seqs: Sequence[int], own: Own) -> list[ClaimedRow]:
        """Return the rows that a claim took, in its order."""
        return await self._store.read(partial(read_claimed, seqs, own))

    async def counts(self) -> OutboxCounts:
        """Return the stored counters and the sizes on disk."""
        now = self._clock()

        def read(db: sqlite3.Connection) -> tuple[tuple[int, ...], int, int | None, int | None]:
            tally = db.execute(_QUERIES["tally"]).fetchone()
            (used_bytes,) = db.execute(sqlite.QUERIES["used_bytes"]).fetchone()
            return tally, used_bytes, _value(db, "oldest_pending", ()), _value(db, "due_since", {"now": now})

        tally, used_bytes, oldest, due_since = await self._store.read(read)
        return OutboxCounts(
            rows=dict(zip(("pending", "inflight", "done", "dead", "aborted"), tally, strict=False)),
            payload_bytes=tally[5],
            waiting_bytes=tally[6],
            used_bytes=used_bytes,
            file_bytes=self._store.file_bytes,
            wal_bytes=self._store.wal_bytes,
            oldest_pending_at=oldest,
            due_ms=0 if due_since is None else max(0, now - due_since),
        )

    async def relay_controls(self) -> dict[str, RelayControl]:
        """Return operators' settings of the relay, by destination ('' for everything)."""
        rows = await self._store.read(lambda db: db.execute(_QUERIES["controls"]).fetchall())
        return {destination: RelayControl(bool(paused), rate) for destination, paused, rate in rows}


def _walk(db: sqlite3.Connection, wanted: RowFilter, parameters: dict[str, Any]) -> tuple[list[OutboxRow], int | None]:
    """Take one step of a list; returns the rows found, and after which row to go on: None at the end."""
    walk = "walk_ids" if wanted.ids is not None else _WALKS.get(wanted.status or "", "walk_all")
    named = _encode(sorted(find_rows(db, wanted.ids or []))).decode()
    candidates = _value(db, walk, {**parameters, "named": named})
    seqs = _decode_seqs(candidates)
    found = _decode_page(_value(db, "page", {**parameters, "seqs": candidates}))
    rows = [_shown(row) for _, row in found]
    if len(found) == parameters["limit"]:
        return rows, found[-1][0]
    return rows, seqs[-1] if len(seqs) == _SCAN else None


def _shown(row: OutboxRow) -> OutboxRow:
    """Return a row as callers and operators see it, with its ids unpacked where it was moved."""
    if row.payload_pruned_at is not None:
        for name in _IDS:
            setattr(row, name, (packed := getattr(row, name)) and unpack(packed))
    return row


def _value(db: sqlite3.Connection, query: str, parameters: Any) -> Any:
    return db.execute(_QUERIES[query], parameters).fetchone()[0]


def _row(db: sqlite3.Connection, row_id: str) -> OutboxRow:
    seq = find_row(db, row_id)
    if seq is None:
        raise row_not_found(row_id)
    return _stored(db, seq)


def _stored(db: sqlite3.Connection, seq: int) -> OutboxRow:
    return _shown(_decode_row(_value(db, "row", {"seq": seq})))


def _with_log(db: sqlite3.Connection, row: OutboxRow, chain: list[OutboxRow]) -> RowChain:
    ids = _encode([link.id for link in chain]).decode()
    log = msgspec.json.decode(_value(db, "log", (ids,)), type=list[OperatorAction])
    posts = msgspec.json.decode(_value(db, "failed_posts", (ids,)), type=list[FailedPosts])
    traceparents = dict(msgspec.json.decode(_value(db, "traceparents", (ids,)), type=list[tuple[str, str | None]]))
    for link in (row, *chain):
        link.traceparent = traceparents.get(link.id)
    return RowChain(row=row, chain=chain, log=log, failed_posts=posts)


def seq_of(cursor: str | None) -> int:
    """Read a cursor, the `seq` of the last row of a page; 0 without one. Raises `InvalidMessage`."""
    if cursor is None:
        return 0
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) <= _CURSOR_DIGITS):
        raise invalid_cursor()
    return int(cursor)


class AllSettled(asyncio.Event):
    """Set when the last of some rows is done, dead or aborted."""

    def __init__(self, row_ids: Iterable[str]) -> None:
        super().__init__()
        self.unsettled = set(row_ids)


class Watchers:
    """The events of callers that wait for rows, by row id."""

    def __init__(self) -> None:
        self._events: dict[str, set[AllSettled]] = {}

    @property
    def any(self) -> bool:
        """Whether a caller waits for a row."""
        return bool(self._events)

    @contextmanager
    def watch(self, *row_ids: str) -> Iterator[AllSettled]:
        """Register for the block; the caller checks the rows once more inside it, before it waits."""
        event = AllSettled(row_ids)
        for row_id in row_ids:
            self._events.setdefault(row_id, set()).add(event)
        try:
            yield event
        finally:
            for row_id in row_ids:
                events = self._events.get(row_id, set())
                events.discard(event)
                if not events:
                    self._events.pop(row_id, None)

    def settled(self, row_ids: Iterable[str]) -> None:
        """Note that these rows have settled, and wake the callers that wait for no other rows."""
        if self._events:
            for row_id in row_ids:
                for event in self._events.get(row_id, ()):
                    event.unsettled.discard(row_id)
                    if not event.unsettled:
                        event.set()
