"""What is kept of a settled row whose payload was removed: some 140 bytes (docs/contract/send.md#send-56).

`prune` moves rows there, oldest first: emptied in place, small payloads would free no page.

ULIDs and UUIDs are packed. A client_message_id is found by its key (`key_of`). A row's own id needs no index: such ids
grow from row to row (`Transactor` ensures that across restarts), so a binary search finds them.
"""

import re
import sqlite3
from base64 import b32hexencode
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple
from uuid import UUID
from zlib import crc32

import msgspec

from outbox.model import Existing
from outbox.transaction import Transaction, read_space
from postroom._wire.sql import load_queries

QUERIES: Final = load_queries("outbox", "sql/settled.sql")
_ULID: Final = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}").fullmatch
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch
_ULID_LENGTH: Final = 26  # characters of 5 bits, the first two of which are nothing
_ULID_BYTES: Final = 16
_UUID_LENGTH: Final = 36
_UUID_TAG: Final = b"-"  # makes 17 bytes of a UUID
PACKED_BYTES: Final = (_ULID_BYTES, _ULID_BYTES + 1)  # of a ULID, and of a UUID
_PACKED: Final = "#"  # begins a packed id in the views: no id has it
_FROM_CROCKFORD: Final = bytes.maketrans(b"ABCDEFGHJKMNPQRSTVWXYZ", b"abcdefghijklmnopqrstuv")
_TO_CROCKFORD: Final = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUV", b"ABCDEFGHJKMNPQRSTVWXYZ")

_decode_existing: Final = msgspec.json.Decoder(list[Existing]).decode
_pack_values: Final = msgspec.msgpack.Encoder().encode
_encode: Final = msgspec.json.Encoder().encode


class _Prunable(NamedTuple):
    """What `prunable` returns, in its order."""

    seq: int
    id: str
    client_message_id: str
    fingerprint: str  # hex
    destination: str
    priority: str
    submitted_by: str
    code: str | None  # of the last error, where it is aborted
    attempts: int
    enqueued_at: int
    settled_at: int
    not_before: int | None
    broker_message_id: str | None
    history_id: int | None
    duplicate: int | None
    unanswered_at: int | None
    aborted_by: str | None
    superseded_by: str | None
    room: int
    payload_bytes: int


_decode_prunable: Final = msgspec.json.Decoder(list[_Prunable]).decode


def prune(settled_before: int, after: int, scan: int, transaction: Transaction) -> tuple[int, int | None]:
    """Drop the payloads of the done and aborted rows among the next `scan` of them after `after`, and move the rows.

    Only those that settled before `settled_before` (ms since the epoch) are moved. Returns how many were pruned, and
    after which row to go on (None at the end).
    """
    parameters = {"after": after, "scan": scan, "before": settled_before}
    found, last = transaction.db.execute(QUERIES["prunable"], parameters).fetchone()
    if not (rows := _decode_prunable(found)):
        return 0, last
    common: dict[tuple[str, str, str, str], int] = {}
    kept = []
    for row in rows:
        shared = row.destination, row.priority, row.submitted_by, row.code or ""
        if shared not in common:
            common[shared] = number_of(transaction.db, shared)
        successor = None if row.superseded_by is None else find_row(transaction.db, row.superseded_by)
        values = (
            row.seq,
            pack(row.id),
            pack(row.client_message_id),
            bytes.fromhex(row.fingerprint),
            common[shared],
            row.attempts,
            row.enqueued_at,
            row.settled_at - row.enqueued_at,
            transaction.now - row.settled_at,
            row.not_before,
            None if row.broker_message_id is None else pack(row.broker_message_id),
            row.history_id,
            row.duplicate,
            row.unanswered_at,
            row.aborted_by,
            successor,
        )
        kept.append((*values, checksum_of(values)))
    transaction.insert(QUERIES["move"], kept)
    keys = [(key_of(row.client_message_id, transaction.salt), row.seq) for row in rows]
    transaction.insert(QUERIES["key"], sorted(keys))
    transaction.highest_key = max(transaction.highest_key, *(key for key, _ in keys))
    seqs = (_encode([row.seq for row in rows]).decode(),)
    transaction.execute(QUERIES["leave"], seqs)
    transaction.execute(QUERIES["leave_payloads"], seqs)
    transaction.execute(QUERIES["leave_failed_posts"], seqs)
    transaction.moved(len(rows), sum(row.payload_bytes for row in rows), sum(row.room for row in rows))
    transaction.next_seq = read_space(transaction.db).next_seq
    return len(rows), last


def number_of(db: sqlite3.Connection, shared: tuple[str, str, str, str]) -> int:
    """Return the number of what rows share: destination, priority, submitted_by and the code of their error."""
    found = db.execute(QUERIES["common"], shared).fetchone()
    if found is None:
        found = db.execute(QUERIES["share"], shared).fetchone()
    return int(found[0])


def checksum_of(values: tuple[object, ...]) -> int:
    """Return the checksum of a moved row, of all its columns before it."""
    return crc32(_pack_values(values)) - 2**31  # four bytes in the file


def read_salt(db: sqlite3.Connection) -> bytes:
    """Return the salt of the keys of the file."""
    salt: bytes = db.execute(QUERIES["salt"]).fetchone()[0]
    return salt


def last_id(db: sqlite3.Connection) -> str:
    """Return the id of the newest row, "" for an empty outbox."""
    found = db.execute(QUERIES["last_id"]).fetchone()
    return "" if found is None else text_of(found[0])


def following(row_id: str) -> str:
    """Return an id right after this one."""
    packed = pack(row_id)
    if isinstance(packed, str):
        return f"{packed}0"
    return text_of((int.from_bytes(packed, "big") + 1).to_bytes(_ULID_BYTES, "big"))


def key_of(client_message_id: str, salt: bytes) -> int:
    """Return the key of an id: 40 bits that change little from one id to the next, and 24 of a hash."""
    return least_key(client_message_id) | int.from_bytes(sha256(salt + client_message_id.encode()).digest()[:3], "big")


def least_key(client_message_id: str) -> int:
    """Return the least key that an id may have: ids that are minted later have a greater one.

    In a ULID the characters 4 to 8 are its time, of a second to a year; a number at the end of an id changes in its
    last three.
    """
    near = client_message_id[3:8] if len(client_message_id) == _ULID_LENGTH else client_message_id[-8:-3]
    return int.from_bytes(near.encode(), "big") << 24


def find_moved(db: sqlite3.Connection, client_message_ids: Sequence[str], salt: bytes) -> dict[str, int]:
    """Return the `seq` of each moved row that has one of these ids, by its id."""
    keys = _encode([key_of(each, salt) for each in client_message_ids]).decode()
    candidates = db.execute(QUERIES["candidates"], (keys,)).fetchall()
    wanted = set(client_message_ids) if candidates else ()
    return {text: seq for seq, packed in candidates if (text := text_of(packed)) in wanted}


def answers(db: sqlite3.Connection, seqs: Sequence[int]) -> list[Existing]:
    """Return these moved rows, for the answers to sends under their ids."""
    (found,) = db.execute(QUERIES["answers"], (_encode(seqs).decode(),)).fetchone()
    return [
        row._replace(
            client_message_id=unpack(row.client_message_id),
            row_id=unpack(row.row_id),
            broker_message_id=row.broker_message_id and unpack(row.broker_message_id),
        )
        for row in _decode_existing(found)
    ]


def find_row(db: sqlite3.Connection, name: str) -> int | None:
    """Return the `seq` of the row with this id, else with this client_message_id, moved or not; None without one."""
    for query, value in (("row_with_id", name), ("moved_with_id", pack(name))):
        if (found := db.execute(QUERIES[query], {"id": value}).fetchone()) is not None:
            return int(found[0])
    return find_send(db, name, read_salt(db))


def find_send(db: sqlite3.Connection, client_message_id: str, salt: bytes) -> int | None:
    """Return the `seq` of the row with this client_message_id, moved or not; None where the id is free."""
    found = db.execute(QUERIES["row_with_client_id"], {"id": client_message_id}).fetchone()
    return int(found[0]) if found else find_moved(db, [client_message_id], salt).get(client_message_id)


def find_rows(db: sqlite3.Connection, names: Sequence[str]) -> set[int]:
    """Return the `seq` of every row that one of these names, each as `find_row` reads it."""
    if not names:
        return set()
    found = dict(db.execute(QUERIES["rows_with_ids"], (_encode(names).decode(),)).fetchall())
    moved = ((name, db.execute(QUERIES["moved_with_id"], {"id": pack(name)}).fetchone()) for name in names)
    found |= {name: row[0] for name, row in moved if row is not None}
    sends = [name for name in names if name not in found]
    rows = db.execute(QUERIES["rows_with_client_ids"], (_encode(sends).decode(),)).fetchall()
    return {*found.values(), *(seq for (seq,) in rows), *find_moved(db, sends, read_salt(db)).values()}


def pack(text: str) -> str | bytes:
    """Return an id as it is stored: ULIDs and UUIDs as bytes."""
    if len(text) == _ULID_LENGTH and _ULID(text):
        return int(text.encode().translate(_FROM_CROCKFORD), 32).to_bytes(_ULID_BYTES, "big")
    if len(text) == _UUID_LENGTH and _UUID(text):
        return bytes.fromhex(text.replace("-", "")) + _UUID_TAG
    return text


def text_of(kept: str | bytes) -> str:
    """Return the id that `pack` made this of."""
    if isinstance(kept, str):
        return kept
    if len(kept) > _ULID_BYTES:
        return str(UUID(bytes=kept[:_ULID_BYTES]))
    padded = (int.from_bytes(kept, "big") << 30).to_bytes(20, "big")  # 26 characters of 5 bits, and 6 more
    return b32hexencode(padded)[:_ULID_LENGTH].translate(_TO_CROCKFORD).decode()


def unpack(shown: str) -> str:
    """Return an id from how a view shows it, packed or not."""
    return text_of(bytes.fromhex(shown[1:])) if shown.startswith(_PACKED) else shown
