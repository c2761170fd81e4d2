"""Accepting sends: look-ups and inserts for any number of sends at once (docs/contract/send.md#send-36).

All sends of a group go through one INSERT that leaves out the ids that exist, so the usual case needs no look-up, and
through one that writes their payloads: the numbers of the rows just written are consecutive. Where some were left out,
one SELECT finds the rows that hold those ids, those that an earlier send of the same group just wrote among them: each
send gets the answer that it would have got alone, in its turn. Where an id may belong to a row that was moved, or not
all may fit, the ids are looked up first.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Final, NamedTuple, Self

import msgspec

from outbox.errors import outbox_full
from outbox.model import AcceptedRow, Caller, Existing, lane_for
from outbox.settled import answers, find_moved, least_key
from outbox.transaction import Transaction, room_of
from postroom._wire.message import PreparedSend, Priority
from postroom._wire.sql import load_queries
from postroom.errors import PostroomError

_QUERIES: Final = load_queries("outbox", "sql/accept.sql")
_ORDINARY_BYTES: Final = 2048  # of a payload: a row of more counts as several, since it takes as long as those
_COLUMNS: Final = 11  # of a new row that `insert` writes
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

AcceptOutcome = list[AcceptedRow | PostroomError]


class Accept(NamedTuple):
    """The sends of one caller, in order."""

    sends: Sequence[PreparedSend]
    caller: Caller
    rows: int  # of ordinary size that it may write

    @classmethod
    def of(cls, sends: Sequence[PreparedSend], caller: Caller) -> Self:
        """Count the rows of the sends."""
        return cls(sends, caller, sum(map(_ordinary_rows, sends)))

    def parts(self, most: int) -> Iterator[Self]:
        """Split it, so that no part writes more than `most` rows of ordinary size, one large message alone excepted."""
        part: list[PreparedSend] = []
        rows = 0
        for send in self.sends:
            if part and rows + _ordinary_rows(send) > most:
                yield self._replace(sends=part, rows=rows)
                part, rows = [], 0
            part.append(send)
            rows += _ordinary_rows(send)
        yield self._replace(sends=part, rows=rows)

    def run(self, transaction: Transaction) -> AcceptOutcome:
        """Accept them."""
        return accept_group(transaction, [self])[0]


class Known(NamedTuple):
    """Sends that nobody may write, and that are answered all the same where their ids have rows."""

    sends: Accept
    rows: int = 1

    def run(self, transaction: Transaction) -> list[AcceptedRow | None]:
        """Look them up; None for a send whose id is free."""
        rows = _new_rows(transaction, self.sends)
        existing = _find(transaction, rows)
        return [
            _answer(row, existing[row.client_message_id]) if row.client_message_id in existing else None for row in rows
        ]


class _NewRow(NamedTuple):
    """What `insert` writes, in its order, the payload, and the bytes of the file that both take."""

    row_id: str
    client_message_id: str
    fingerprint: bytes
    enqueued_at: int
    next_attempt_at: int
    lane: int
    priority: Priority
    destination: str
    submitted_by: str
    not_before: int | None
    payload_bytes: int
    payload: bytes
    room: int


_decode_existing: Final = msgspec.json.Decoder(list[Existing]).decode
_encode: Final = msgspec.json.Encoder().encode


def _ordinary_rows(send: PreparedSend) -> int:
    return 1 + len(send.payload) // _ORDINARY_BYTES


def accept_group(transaction: Transaction, group: Sequence[Accept]) -> list[AcceptOutcome]:
    """Accept the sends of all of `group` in order; the outcomes are per member of the group, per send."""
    rows = [row for accept in group for row in _new_rows(transaction, accept)]
    highest = transaction.highest_key  # of the moved rows: most ids are newer
    old = [row.client_message_id for row in rows if least_key(row.client_message_id) <= highest] if highest >= 0 else []
    looked_up = (
        _room(rows) > transaction.headroom
        or transaction.next_seq is not None
        or (old and find_moved(transaction.db, old, transaction.salt))
    )
    answers = iter(_accept_what_is_new(transaction, rows) if looked_up else _write(transaction, rows))
    return [[next(answers) for _ in accept.sends] for accept in group]


def _new_rows(transaction: Transaction, accept: Accept) -> list[_NewRow]:
    submitted_by = f"{accept.caller.uid}:{accept.caller.gid}"
    new_id, now, dated = transaction.new_id, transaction.now, transaction.dated
    rows = []
    for send in accept.sends:
        not_before = None if send.not_before is None else to_milliseconds(send.not_before)
        due = now if not_before is None else max(now, not_before)
        row = _NewRow(
            new_id(),
            send.client_message_id,
            send.fingerprint,
            dated,
            due,
            lane_for(send.priority, due, now),
            send.priority,
            send.destination,
            submitted_by,
            not_before,
            len(send.payload),
            send.payload,
            room_of(len(send.payload)),
        )
        rows.append(row)
    return rows


def to_milliseconds(moment: datetime) -> int:
    """Turn a time with an offset into ms since the epoch, never early."""
    return -((_EPOCH - moment) // timedelta(milliseconds=1))


def _write(transaction: Transaction, rows: Sequence[_NewRow]) -> AcceptOutcome:
    """Insert the rows whose id is free, and answer from the rows that stand there now."""
    inserted, last = transaction.insert(_QUERIES["insert"], [row[:_COLUMNS] for row in rows])
    if inserted == len(rows):
        _complete(transaction, rows, range(last - inserted + 1, last + 1))
        return [_inserted(row) for row in rows]
    existing = _find(transaction, rows)
    written = [row for row in rows if existing[row.client_message_id].row_id == row.row_id]
    _complete(transaction, written, [existing[row.client_message_id].seq for row in written])
    return [_answer(row, existing[row.client_message_id]) for row in rows]


def _accept_what_is_new(transaction: Transaction, rows: Sequence[_NewRow]) -> AcceptOutcome:
    """Answer what exists, write what is new and fits, refuse the rest (507)."""
    known = set(_find(transaction, rows))
    headroom = transaction.headroom
    new = []
    for row in rows:
        if row.client_message_id not in known and row.room <= headroom:
            headroom -= row.room
            known.add(row.client_message_id)
            new.append(row)
    if new:  # the first gets the number that is next, which the table may not know
        numbered = [(transaction.next_seq, *new[0][:_COLUMNS])]
        _, first = transaction.insert(_QUERIES["insert_numbered"], numbered)
        transaction.next_seq = None
        transaction.insert(_QUERIES["insert"], [row[:_COLUMNS] for row in new[1:]])
        _complete(transaction, new, range(first, first + len(new)))
    existing = _find(transaction, rows)
    return [
        _answer(row, existing[row.client_message_id])
        if row.client_message_id in existing
        else outbox_full(transaction.max_bytes)
        for row in rows
    ]


def _complete(transaction: Transaction, written: Sequence[_NewRow], seqs: Sequence[int]) -> None:
    """Write the payloads of new rows, which have these numbers, and count them."""
    if written:
        payloads = [(seq, row.payload) for seq, row in zip(seqs, written, strict=True)]
        transaction.insert(_QUERIES["insert_payloads"], payloads)
        transaction.added(len(written), sum(row.payload_bytes for row in written), _room(written))


def _find(transaction: Transaction, rows: Sequence[_NewRow]) -> dict[str, Existing]:
    ids = [row.client_message_id for row in rows]
    found = _decode_existing(transaction.value(_QUERIES["find"], (_encode(ids).decode(),)))
    if transaction.space.moved and (moved := find_moved(transaction.db, ids, transaction.salt)):
        found += answers(transaction.db, list(moved.values()))
    return {existing.client_message_id: existing for existing in found}


def _room(rows: Sequence[_NewRow]) -> int:
    return sum(row.room for row in rows)


def _inserted(row: _NewRow) -> AcceptedRow:
    # By place: names would take twice as long, for every row that is written.
    return AcceptedRow(
        True, row.row_id, "pending", row.fingerprint, row.destination, row.enqueued_at, _uid(row.submitted_by)
    )


@lru_cache(maxsize=64)
def _uid(submitted_by: str) -> int:
    return int(submitted_by.partition(":")[0])


def _answer(row: _NewRow, existing: Existing) -> AcceptedRow:
    if existing.row_id == row.row_id:
        return _inserted(row)
    return AcceptedRow(
        inserted=False,
        row_id=existing.row_id,
        status=existing.status,
        fingerprint=bytes.fromhex(existing.fingerprint),
        destination=existing.destination,
        enqueued_at=existing.enqueued_at,
        submitted_uid=_uid(existing.submitted_by),
        broker_message_id=existing.broker_message_id,
        history_id=existing.history_id,
        last_error=existing.last_error,
    )
