"""Accepting sends: look-ups and inserts for any number of sends at once (docs/contract/send.md#send-36).

All sends of a group go through one INSERT that skips existing ids, so the usual case needs no look-up, and through one
that writes their payloads: the numbers of the new rows are consecutive. Where some were skipped, one SELECT finds the
rows that hold those ids, also rows of earlier sends of the same group: each send gets the answer that it would have got
alone, in its turn. Where an id may belong to a row that was moved, or not all may fit, the ids are looked up first.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, Self

import msgspec

from outbox.errors import outbox_full
from outbox.model import Caller, Existing
from outbox.settled import answers, find_moved, least_key
from outbox.transaction import Transaction, room_of
from postroom._wire.accept_table import AcceptedRow
from postroom._wire.message import PreparedSend
from postroom._wire.moment import to_milliseconds
from postroom._wire.sql import load_queries
from postroom.errors import PostroomError

_QUERIES: Final = load_queries("outbox", "sql/accept.sql")
_ORDINARY_BYTES: Final = 2048  # of a payload: a row of more counts as several, since it takes as long as those

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
            more = _ordinary_rows(send)
            if part and rows + more > most:
                yield self._replace(sends=part, rows=rows)
                part, rows = [], 0
            part.append(send)
            rows += more
        yield self._replace(sends=part, rows=rows)

    def run(self, transaction: Transaction) -> AcceptOutcome:
        """Accept them."""
        return accept_group(transaction, [self])[0]


def known(sends: Accept, transaction: Transaction) -> list[AcceptedRow | None]:
    """Look up sends that must not be written, but are answered where their ids have rows; None for a free id."""
    rows = _new_rows(transaction, sends)
    existing = _find(transaction, rows)
    return [
        _answer(row, existing[row.client_message_id]) if row.client_message_id in existing else None for row in rows
    ]


class _NewRow(msgspec.Struct, frozen=True, gc=False):
    """A row to be written: its id, its send, what `insert` writes, in its order, and the bytes of the file it takes."""

    row_id: str
    client_message_id: str
    send: PreparedSend
    accepted: AcceptedRow  # the answer to its sender
    columns: tuple[object, ...]
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
    outcomes = iter(_accept_what_is_new(transaction, rows) if looked_up else _write(transaction, rows))
    return [[next(outcomes) for _ in accept.sends] for accept in group]


def _new_rows(transaction: Transaction, accept: Accept) -> list[_NewRow]:
    uid, gid, _ = accept.caller
    submitted_by = f"{uid}:{gid}"
    now, dated = transaction.now, transaction.dated
    rows = []
    for row_id, send in zip(transaction.new_ids(len(accept.sends)), accept.sends, strict=True):
        name, fingerprint, to, priority = send.client_message_id, send.fingerprint, send.destination, send.priority
        size = len(send.payload)
        not_before, due = None, now
        if send.not_before is not None:
            not_before = to_milliseconds(send.not_before)
            due = max(now, not_before)
        lane = transaction.lane(priority, due)
        columns = row_id, name, fingerprint, dated, due, lane, priority, to, submitted_by, not_before, size
        accepted = AcceptedRow(True, row_id, "pending", fingerprint, to, dated, uid)
        rows.append(_NewRow(row_id, name, send, accepted, columns, room_of(size)))
    return rows


def _write(transaction: Transaction, rows: Sequence[_NewRow]) -> AcceptOutcome:
    """Insert the rows whose id is free, and answer from the rows that have the ids then."""
    inserted, last = transaction.insert(_QUERIES["insert"], [row.columns for row in rows])
    if inserted == len(rows):
        _complete(transaction, rows, range(last - inserted + 1, last + 1))
        return [row.accepted for row in rows]
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
    if new:  # the first gets the next number, which the table may not know
        _, first = transaction.insert(_QUERIES["insert_numbered"], [(transaction.next_seq, *new[0].columns)])
        transaction.next_seq = None
        transaction.insert(_QUERIES["insert"], [row.columns for row in new[1:]])
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
        payloads = [(seq, row.send.payload) for seq, row in zip(seqs, written, strict=True)]
        transaction.insert(_QUERIES["insert_payloads"], payloads)
        transaction.added(len(written), sum(len(row.send.payload) for row in written), _room(written))


def _find(transaction: Transaction, rows: Sequence[_NewRow]) -> dict[str, Existing]:
    ids = [row.client_message_id for row in rows]
    found = _decode_existing(transaction.value(_QUERIES["find"], (_encode(ids).decode(),)))
    if transaction.space.moved and (moved := find_moved(transaction.db, ids, transaction.salt)):
        found += answers(transaction.db, list(moved.values()))
    return {existing.client_message_id: existing for existing in found}


def _room(rows: Sequence[_NewRow]) -> int:
    return sum(row.room for row in rows)


def _answer(row: _NewRow, existing: Existing) -> AcceptedRow:
    if existing.row_id == row.row_id:
        return row.accepted
    return AcceptedRow(
        inserted=False,
        row_id=existing.row_id,
        status=existing.status,
        fingerprint=bytes.fromhex(existing.fingerprint),
        destination=existing.destination,
        enqueued_at=existing.enqueued_at,
        submitted_uid=int(existing.submitted_by.partition(":")[0]),
        broker_message_id=existing.broker_message_id,
        history_id=existing.history_id,
        last_error=existing.last_error,
    )
