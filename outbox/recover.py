"""Save what can be read of a damaged outbox into a new file: `postroom outbox recover`, on a stopped daemon.

The rules begin at docs/contract/send.md#send-94. The pages are read without SQLite (outbox/pages.py), so that any of
them may be damaged. The number of rows comes from the counters, else from the highest number in any row or index; where
neither can be trusted it is unknown (`outbox_recovery` in schema.sql).

A row is recognised by the number of columns of its table. So no step of the schema adds a column to an existing table,
and a file that a later release has written is refused: the rows of its new tables would be left out silently.
"""

import contextlib
import os
import sqlite3
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import astuple, replace

from outbox.backup import OPERATIONS, draft_of
from outbox.errors import recovery_failed
from outbox.model import NAME, SCHEMA
from outbox.pages import Pages, Records, Wrong, in_order
from outbox.settled import PACKED_BYTES, checksum_of, find_moved, following, key_of, number_of, pack, read_salt, text_of
from outbox.settled import QUERIES as SETTLED
from outbox.transaction import room_of
from postroom._wire.ids import now_ms
from postroom._wire.message import Envelope, check_envelope
from postroom._wire.names import MESSAGE_ID
from postroom._wire.sql import load_queries
from postroom.chassis import sqlite, store, wal
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import create_private, hand_over, refuse_link, sync, why_refused
from postroom.errors import PostroomError

_QUERIES: Final = load_queries("outbox", "sql/recover.sql")
_SAMPLE: Final = 100  # rows that show whether fingerprints are those of their messages
_LEAST_OF_ROW: Final = 60  # bytes that a row takes of the file, however short its ids are
_NUMBERED: Final = (  # tables and indexes that have the number of each row, or of each that was moved
    *("outbox", "outbox_payload", "sqlite_autoindex_outbox_1", "sqlite_autoindex_outbox_2"),
    *("outbox_settled", "outbox_settled_key"),
)
_DAMAGED: Final = "unreadable: the row was damaged"
_HEADER: Final = struct.Struct(">16s44xI4xI")  # of a file: what it is, `user_version`, `application_id`
_SQLITE: Final = b"SQLite format 3\0"
_MOST_STEPS: Final = 10_000  # in a schema; a version beyond them is damage
T = TypeVar("T")


class Recovery(NamedTuple):
    """What was saved, what is missing, and where the damaged file is now."""

    damaged: Path
    saved: int  # rows
    missing: int | None  # rows that were written and could not be saved; None where their number is unknown
    buried: int  # of them: their ids stay used
    log_lines: int
    lost_log_lines: int
    damaged_frames: int  # pages of the write-ahead log: what is saved from them may be older than it was
    unaccepted: bool  # rows are missing, of this recovery or an earlier one, and no operator has accepted that yet

    @property
    def whole(self) -> bool:
        """Whether nothing that was written is missing."""
        return not (self.unaccepted or self.lost_log_lines or self.damaged_frames)


_Time = Annotated[int, Meta(ge=-62_135_596_800_000, lt=253_402_300_800_000)]  # ms since the epoch, in Python's calendar
_Number = Annotated[int, Meta(ge=0, lt=2**53)]
_Id = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:~-]{1,160}\Z")]
_Packed = Any  # str or bytes, which msgspec cannot distinguish
_Owner = Annotated[str, Meta(pattern=r"\A-?[0-9]{1,10}:-?[0-9]{1,10}\Z")]
_Fingerprint = Annotated[bytes, Meta(min_length=32, max_length=32)]
_Priority = Literal["now", "next", "low"]
_AbortedBy = Literal["operator", "auto"]


class _Live(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A row of the table `outbox`, in its order, as far as it can be checked by itself."""

    seq: int
    id: _Id
    client_message_id: _Id
    request_fingerprint: _Fingerprint
    enqueued_at: _Time
    attempts: _Number
    next_attempt_at: _Time
    status: Literal["pending", "inflight", "done", "dead", "aborted"]
    lane: int | None
    priority: _Priority
    destination: str
    submitted_by: _Owner
    not_before: _Time | None
    last_error: str | None
    delivered_at: _Time | None
    broker_message_id: str | None
    history_id: _Number | None
    duplicate: Literal[1] | None
    unanswered_at: _Time | None
    aborted_at: _Time | None
    aborted_by: _AbortedBy | None
    superseded_by: _Id | None
    payload_bytes: _Number
    resent_at: _Time | None = None


class _Moved(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A row of the table `outbox_settled`, in its order."""

    seq: int
    id: _Packed
    client_message_id: _Packed
    request_fingerprint: _Fingerprint
    common: _Number
    attempts: _Number
    enqueued_at: _Time
    settled_after: int
    pruned_after: int
    not_before: _Time | None = None
    broker_message_id: _Packed | None = None
    history_id: _Number | None = None
    duplicate: Literal[1] | None = None
    unanswered_at: _Time | None = None
    aborted_by: _AbortedBy | None = None
    superseded_by: _Number | None = None
    checksum: int = 0


# Rows of other tables, in the order of their columns, and keys of indexes and of tables without rowids.
_Shared = tuple[str, _Priority, _Owner, str]  # by moved rows: destination, priority, submitted_by, last_error
_CommonRow = tuple[int, str, _Priority, _Owner, str]
_CommonKey = tuple[str, _Priority, _Owner, str, _Number]
_Payload = tuple[int, bytes]
_LogLine = tuple[int, _Time, str, str, str, str | None, str | None]
_Recovered = tuple[_Time, _Number, _Number | None, _Number, _Time | None, str | None]
_FailedPosts = tuple[int, str]
_Posts = Annotated[list[tuple[_Time, _Number, str, str, _Time, _Number]], Meta(max_length=20)]  # of a row, as JSON
_Tally = tuple[int, _Number, _Number, _Number, _Number, _Number, _Number, _Number, _Number, _Number]  # the counters
_Control = tuple[str, Literal[0, 1], float | None]
_Entry = tuple[_Id, _Number]  # an id, and the number of the row that has it
_Key = tuple[int, _Number]  # the same of a moved row, by its key

_UNKNOWN: Final[_Shared] = ("", "next", "-1:-1", "")


def _fingerprint_of(payload: bytes | None) -> bytes | None:
    """Compute the fingerprint of a message; None for one that cannot be read."""
    try:
        return None if payload is None else check_envelope(msgspec.json.decode(payload, type=Envelope)).fingerprint
    except (PostroomError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def recover(directory: Path, *, clock: Callable[[], int] = now_ms) -> Recovery:
    """Save the rows of the outbox of `directory` into a new file, set the old one aside, and replace it.

    The old one becomes `outbox.db.damaged-<ms>` once the new one is whole; until then a failure leaves everything as it
    was. After a kill between the two, the next call saves from what was set aside: the new file's draft is still there.
    Without a draft the outbox was lost later, and what was set aside before does not show what is missing.

    Raises `Fatal`, also where there is no outbox, one that a later release has written, or a link in its place.
    """
    file = store.OwnedFile(directory, NAME, may_be_anothers=True)
    drafts: tuple[Path, Path] = (draft_of(file.path, "recovering"), draft_of(file.path, "restoring"))
    cut_short = not file.path.exists() and any(draft.exists() for draft in drafts)
    saved, fresh = False, drafts[0]
    try:
        file.begin()
        now = clock()
        source = file.path
        if sqlite.log_alone(source) and file.damaged is None:
            create_private(source)  # where it is missing: the log has rows, and is set aside with it
        is_older = not source.exists() and not cut_short
        if not source.exists():  # the file that was set aside has the rows, and its log may still be here
            if file.damaged is None:
                raise Fatal(
                    Exit.CONFIG, f"there is no outbox in {file.path.parent}: check state_directory in the config"
                )
            source = file.damaged
            file.clear(now)
        recovery = _salvage(source, fresh, now, is_older=is_older)
        if source == file.path:
            cut_short = True
            recovery = recovery._replace(damaged=store.set_aside(source, now))
        fresh.rename(file.path)
        sync(file.path.parent)
        saved = True
    except (OSError, sqlite3.Error) as error:
        raise recovery_failed(file.path, error) from error
    finally:
        if not saved and not cut_short:  # it may be large, and the disk full
            with contextlib.suppress(OSError):
                store.remove(fresh)
        file.end(clean=saved or not file.unclean)
    return recovery


def _refuse_later(pages: Pages, source: Path) -> None:
    """Raise `Fatal` (78) where a later release wrote the file; a damaged first page is ignored."""
    try:
        mark, version, application = _HEADER.unpack_from(pages.newest(1))
    except Wrong:
        return
    if (mark, application) == (_SQLITE, SCHEMA.application_id) and SCHEMA.version < version < _MOST_STEPS:
        raise Fatal(
            Exit.CONFIG,
            f"{source} has schema version {version}, and this program knows the rows of version {SCHEMA.version}: "
            "run the `postroom outbox recover` of the newer program that wrote it",
        )


def _salvage(source: Path, fresh: Path, now: int, *, is_older: bool) -> Recovery:
    """Fill a new file next to the database, until it is whole and on disk; `is_older` than what was lost."""
    try:
        for part in sqlite.PARTS:
            refuse_link(Path(f"{source}{part}"))
    except OSError as error:
        why = why_refused(error, "check the state directory")
        raise Fatal(Exit.CONFIG, f"cannot recover {source}: {why}") from error
    with contextlib.closing(Pages(source, SCHEMA.own_page)) as pages:
        _refuse_later(pages, source)
        store.remove(fresh)  # of a recovery that was cut short
        created = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:  # as its directory's owner's: root may recover the outbox of a daemon
            hand_over(created, fresh.parent)
        finally:
            os.close(created)
        with contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as new:
            new.executescript(_QUERIES["pragmas"])
            SCHEMA.migrate(new, fresh)
            new.execute(sqlite.QUERIES["begin"])
            recovery = _Salvage(pages, new, now).run(source, is_older=is_older)
            new.execute(sqlite.QUERIES["commit"])
            new.execute(sqlite.QUERIES["checkpoint_truncate"]).fetchall()
    sync(fresh)
    return recovery


class _Salvage:
    """Fills a new file from the pages of a damaged one, whose tables and indexes have the same root pages."""

    def __init__(self, pages: Pages, new: sqlite3.Connection, now: int) -> None:
        self._pages = pages
        self._new = new
        self._now = now
        self._salt = read_salt(new)
        schema = new.execute(_QUERIES["schema"]).fetchall()
        self._roots = {name: root for name, root, _, _ in schema}
        self._shapes = {name: columns for name, _, table, columns in schema if table}
        self._records = Records(pages, {root: table for _, root, table, _ in schema}, self._shapes.values())
        self._highest: Counter[str] = Counter()  # number that each table and each index knows of
        self._without_message: dict[int, _Live] = {}  # rows that wait, by number
        self._room = self._payload_bytes = self._moved = 0  # of the rows that were found

    def run(self, source: Path, *, is_older: bool) -> Recovery:
        """Save everything, and count it."""
        (keeps_payloads,) = self._new.execute(_QUERIES["trigger"], ("outbox_keeps_payloads",)).fetchone()
        self._new.execute(_QUERIES["drop_trigger"])
        self._read_indexes()
        shared: dict[int, _Shared] = {number: tuple(row) for number, *row in self._rows("outbox_common", _CommonRow)}
        indexed = self._keys("sqlite_autoindex_outbox_common_1", _CommonKey)
        shared |= {number: tuple(row) for (*row, number), sound in indexed if sound}
        for row in self._rows("outbox_settled", _Moved):
            if row.checksum == checksum_of(astuple(row)[:-1]):
                self._moved += self._write_moved(row, shared.get(row.common, _UNKNOWN))
        for seq, payload in self._rows("outbox_payload", _Payload):  # those without a row are deleted below
            with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                msgspec.json.decode(payload, type=Envelope)
                self._new.execute(_QUERIES["keep_payload"], (seq, payload))
        saved = self._moved + self._keep_rows()
        missing = None if is_older else self._missing(saved)
        buried = self._bury()
        self._new.execute(_QUERIES["drop_payloads_without_row"])
        self._new.execute(keeps_payloads)
        self._new.execute(_QUERIES["recount"])
        self._new.execute(_QUERIES["report_again"])
        if missing is None or self._pages.damaged_frames:  # rows may be older than they were
            self._new.execute(OPERATIONS["doubt"], {"now": self._now})
        for seq, posts in self._rows("outbox_failed_posts", _FailedPosts):
            with contextlib.suppress(msgspec.MsgspecError):
                msgspec.json.decode(posts, type=_Posts)
                self._new.execute(_QUERIES["keep_failed_posts"], {"seq": seq, "posts": posts})
        for line in self._rows("operator_log", _LogLine):
            self._new.execute(_QUERIES["keep_log_line"], line)
        (lines,) = self._new.execute(_QUERIES["log_lines"]).fetchone()
        entries = (seq for (_, seq), sound in self._keys("operator_log_row", _Entry) if sound)
        last = max(self._highest["operator_log"], max(filter(self._is_number, entries), default=0))
        for control, _ in self._keys("relay_control", _Control):
            self._new.execute(_QUERIES["keep_control"], control)
        for recovery in self._rows("outbox_recovery", _Recovered, numbered=False):
            self._new.execute(_QUERIES["keep_recovery"], recovery)
        self._new.execute(_QUERIES["keep_recovery"], (self._now, saved, missing, buried, None, None))
        (unaccepted, _) = self._new.execute(_QUERIES["unaccepted"]).fetchone()
        lost_lines, frames = max(0, last - lines), self._pages.damaged_frames
        return Recovery(source, saved, missing, buried, lines, lost_lines, frames, bool(unaccepted))

    def _rows(self, table: str, kind: Any, *, numbered: bool = True) -> Iterator[Any]:
        """Yield the rows of a table that are of their kind, with their numbers; the newest of each first."""
        for row in self._records.rows(self._shapes[table]):
            if not numbered or self._is_number(row.rowid):
                with contextlib.suppress(msgspec.ValidationError):
                    found = msgspec.convert((row.rowid, *row.values[1:]), kind)
                    self._highest[table] = max(self._highest[table], row.rowid)
                    yield found

    def _keys(self, index: str, kind: Any) -> Iterator[tuple[Any, bool]]:
        """Yield the keys of an index that are of their kind, each with whether it is where it should be."""
        for page in self._records.keys(self._roots[index]):
            keys = []
            for key in page:
                with contextlib.suppress(msgspec.ValidationError):
                    keys.append(msgspec.convert(key, kind))
            yield from in_order(keys)

    def _is_number(self, value: int) -> bool:
        """Return whether something may have this number: each takes some of the file, permanently."""
        return 0 < value <= max(1_000_000, self._pages.count * wal.PAGE // _LEAST_OF_ROW)

    def _read_indexes(self) -> None:
        """Note what the indexes have of each number."""
        self._new.execute(_QUERIES["create_indexed"])
        for query, name in (("indexed_name", "sqlite_autoindex_outbox_2"), ("indexed_id", "sqlite_autoindex_outbox_1")):
            for (text, seq), sound in self._keys(name, _Entry):
                if self._is_number(seq):
                    self._new.execute(_QUERIES[query], {"seq": seq, "text": text, "sound": sound})
                    self._highest[name] = max(self._highest[name], seq * sound)
        for (_, seq), sound in self._keys("outbox_settled_key", _Key):
            if sound and self._is_number(seq):
                self._highest["outbox_settled_key"] = max(self._highest["outbox_settled_key"], seq)

    def _write_moved(self, row: _Moved, shared: _Shared) -> bool:
        """Write a row as a moved one; return whether it was whole, and new."""
        ids = (row.id, row.client_message_id, row.broker_message_id or "")
        if not all(isinstance(each, str) or (isinstance(each, bytes) and len(each) in PACKED_BYTES) for each in ids):
            return False
        name = text_of(row.client_message_id)
        if not MESSAGE_ID.allows(name) or self._is_kept(row.seq, name):
            return False
        values = astuple(replace(row, common=number_of(self._new, shared)))[:-1]
        try:
            self._new.execute(SETTLED["move"], (*values, checksum_of(values)))
        except sqlite3.IntegrityError:
            return False
        self._new.execute(SETTLED["key"], (key_of(name, self._salt), row.seq))
        return True

    def _is_kept(self, seq: int, client_message_id: str) -> bool:
        """Return whether the new file has a row with this number, or with this id."""
        wanted = {"seq": seq, "client_message_id": client_message_id}
        (kept,) = self._new.execute(_QUERIES["is_kept"], wanted).fetchone()
        return bool(kept or find_moved(self._new, [client_message_id], self._salt))

    def _keep_rows(self) -> int:
        """Write the other rows; returns how many."""
        rows: Iterator[_Live] = self._rows("outbox", _Live)
        sample = list(islice(rows, _SAMPLE))
        computed = sum(_fingerprint_of(self._payload(row)) == row.request_fingerprint for row in sample)
        strict = computed * 2 > len(sample)  # else they were not computed by Postroom, and prove nothing
        return sum(self._keep_row(row, strict=strict) for row in chain(sample, rows))

    def _keep_row(self, row: _Live, *, strict: bool) -> bool:
        indexed = self._new.execute(_QUERIES["indexed"], (row.seq,)).fetchone()
        name, row_id, sound_name, sound_id = indexed or (None, None, 0, 0)
        if not MESSAGE_ID.allows(row.client_message_id) or self._is_kept(row.seq, row.client_message_id):
            return False
        if (sound_name and name != row.client_message_id) or (sound_id and row_id != row.id):
            return False
        payload = self._payload(row)
        fingerprint = _fingerprint_of(payload) if strict else row.request_fingerprint
        if payload is None or fingerprint is None:  # the message is damaged
            return self._keep_without_message(row)
        if fingerprint != row.request_fingerprint:  # the message, the fingerprint or another column is damaged
            self._without_message.setdefault(row.seq, row)
            return False
        try:
            self._new.execute(_QUERIES["keep"], astuple(row))
        except sqlite3.IntegrityError:
            return False
        return self._count(row)

    def _count(self, row: _Live) -> bool:
        self._room += room_of(row.payload_bytes)
        self._payload_bytes += row.payload_bytes
        return True

    def _keep_without_message(self, row: _Live) -> bool:
        """Keep the rest of a row whose message is lost: one that is done or aborted needs none."""
        settled_at = row.delivered_at if row.status == "done" else row.aborted_at if row.status == "aborted" else None
        if settled_at is None:
            self._without_message.setdefault(row.seq, row)
            return False
        successor = self._new.execute(_QUERIES["indexed_by_id"], (row.superseded_by,)).fetchone()
        code = (row.last_error or "").partition(":")[0] if row.status == "aborted" else ""
        moved = replace(
            self._as_moved(row, settled_at),
            pruned_after=self._now - settled_at,
            not_before=row.not_before,
            broker_message_id=row.broker_message_id and pack(row.broker_message_id),
            history_id=row.history_id,
            duplicate=row.duplicate,
            aborted_by=row.aborted_by,
            superseded_by=successor and successor[0],
        )
        return self._write_moved(moved, (row.destination, row.priority, row.submitted_by, code)) and self._count(row)

    def _payload(self, row: _Live) -> bytes | None:
        found = self._new.execute(_QUERIES["payload"], (row.seq,)).fetchone()
        return found[0] if found is not None and len(found[0]) == row.payload_bytes else None

    def _missing(self, saved: int) -> int | None:
        """Return how many rows there were beyond those saved, None where neither counters nor numbers are reliable.

        Counters are trusted where all of them fit what was found: rows that are missing took room. A number is trusted
        where two of the tables and indexes have one as high.
        """
        if self._pages.cut_off or not self._pages.is_current(self._roots["tally"]):
            return None
        for _, *states, payloads, moved, waiting_room, kept_room in self._rows("tally", _Tally):
            missing: int = sum(states) - saved
            waited = missing - (moved - self._moved)
            room = waiting_room + kept_room - self._room
            payload_bytes = payloads - self._payload_bytes
            if min(missing, waited, moved - self._moved, payload_bytes) >= 0 and (
                room >= waited * room_of(0) if waited else room == payload_bytes == 0
            ):
                return missing
        highest = sorted(self._highest[each] for each in _NUMBERED)[-2:]
        return max(0, highest[0] - saved) if highest[0] else None

    def _bury(self) -> int:
        """Keep the known ids of lost rows used; returns how many."""
        buried = 0
        for _, row in sorted(self._without_message.items()):
            moved = replace(self._as_moved(row, self._now), aborted_by="auto")
            buried += self._write_moved(moved, (row.destination, row.priority, row.submitted_by, _DAMAGED))
        for seq, name, known in self._new.execute(_QUERIES["indexed_and_lost"]).fetchall():
            if seq not in self._without_message:
                before = self._new.execute(_QUERIES["id_before"], {"seq": seq}).fetchone()  # ids grow with numbers
                row_id = known or following(text_of(before[0]) if before else "0" * 26)
                lost = _Moved(seq, pack(row_id), pack(name), bytes(32), 0, 0, self._now, 0, 0, aborted_by="auto")
                buried += self._write_moved(lost, (*_UNKNOWN[:3], _DAMAGED))
        return buried

    def _as_moved(self, row: _Live, settled_at: int) -> _Moved:
        """Return the columns of a row that every moved row has."""
        return _Moved(
            row.seq,
            pack(row.id),
            pack(row.client_message_id),
            row.request_fingerprint,
            0,
            row.attempts,
            row.enqueued_at,
            settled_at - row.enqueued_at,
            0,
            unanswered_at=row.unanswered_at,
        )
