"""Save what can be read of a damaged outbox into a new file: `postroom outbox recover`, on a stopped daemon.

The damaged files are renamed once the new file is whole, never overwritten, never changed. Rows are read in stretches;
a stretch that fails is halved until only the rows that cannot be read are left out. The index of the client_message_ids
is read on its own: an id whose row is lost is buried as an aborted row, so that it stays used (seed §4.1).
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from chassis.exits import Exit, Fatal
from chassis.ownership import hand_over
from chassis.sql import load_queries
from chassis.sqlite import PARTS
from chassis.sqlite import QUERIES as CONNECTION
from chassis.sqlite_file import OwnedFile, move, set_aside, sync
from outbox.errors import recovery_failed
from outbox.migrate import migrate
from outbox.outbox import NAME, now_ms
from outbox.settled import QUERIES as SETTLED
from outbox.settled import find_moved, key_of, number_of, read_salt, text_of
from postroom.ids import new_id
from postroom.message import Envelope

_QUERIES: Final = load_queries("outbox", "sql/recover.sql")
_STRETCH: Final = 64  # rows read at once; each may have a payload of more than a megabyte
_ROW_BYTES: Final = 100  # fewer than any row takes in the file


class Recovery(NamedTuple):
    """What was saved, and where the damaged file lies now."""

    damaged: Path
    rows: int
    buried: int  # ids whose rows could not be read
    log_lines: int
    lost_log_lines: int


def recover(directory: Path, *, clock: Callable[[], int] = now_ms, new_id: Callable[[], str] = new_id) -> Recovery:
    """Save the rows of the outbox of `directory` into a new file, set the old one aside, and put the new in its place.

    The old one becomes `outbox.db.damaged-<ms>` once the new one is whole; until then a failure leaves everything as it
    was. After a kill between the two, the next call saves from what was set aside.

    Raises `Fatal`: 69 while a daemon runs there, 78 where there is no outbox, 75 on a full disk, 74 on one that fails.
    """
    file = OwnedFile(directory, NAME, may_be_anothers=True)
    saved = False
    try:
        source = _source(file)
        now = clock()
        fresh, recovery = _salvage(source, file.path, now, new_id)
        if source == file.path:
            recovery = recovery._replace(damaged=set_aside(source, now))
        fresh.rename(file.path)
        sync(file.path.parent)
        saved = True
    except (OSError, sqlite3.Error) as error:
        raise recovery_failed(file.path, error) from error
    finally:
        file.end(clean=saved)
    return recovery


def _source(file: OwnedFile) -> Path:
    """Return the outbox, or where a kill left none the file that was set aside, with what stayed behind of it."""
    if file.path.exists():
        return file.path
    if file.damaged is None:
        raise Fatal(Exit.CONFIG, f"there is no outbox in {file.path.parent}")
    move(file.path, file.damaged)
    return file.damaged


def _salvage(source: Path, database: Path, now: int, new_id: Callable[[], str]) -> tuple[Path, Recovery]:
    """Fill a new file beside the database; return it, whole and on disk."""
    fresh = database.with_name(f"{database.name}.recovering")
    for part in PARTS:
        Path(f"{fresh}{part}").unlink(missing_ok=True)  # of a recovery that was cut short
    _create(fresh)
    with (
        contextlib.closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True, isolation_level=None)) as old,
        contextlib.closing(sqlite3.connect(fresh, isolation_level=None)) as new,
    ):
        new.executescript(_QUERIES["pragmas"])
        migrate(new, fresh)
        recovery = _copy(old, new, source, now, new_id)
        new.execute(CONNECTION["checkpoint_truncate"]).fetchall()
    sync(fresh)
    return fresh, recovery


def _create(file: Path) -> None:
    """Create the file, 0600 from the start, as its directory's owner's: root may recover the outbox of a daemon."""
    created = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        hand_over(created, file.parent)
    finally:
        os.close(created)


def _copy(
    old: sqlite3.Connection, new: sqlite3.Connection, damaged: Path, now: int, new_id: Callable[[], str]
) -> Recovery:
    new.execute(CONNECTION["begin"])
    most = damaged.stat().st_size // _ROW_BYTES
    rows = sum(_keep(new, row) for row in _read(old, "rows", _last(old, ("last_seq", "last_seq_in_index"), most)))
    rows += _keep_moved(old, new, most)
    buried = sum(_bury(new, client_message_id, now, new_id) for client_message_id in _ids(old))
    last_line = _last(old, ("last_log_line",), 0)
    lines = 0
    for line in _read(old, "log_lines", last_line):
        new.execute(_QUERIES["keep_log_line"], line)
        lines += 1
    with contextlib.suppress(sqlite3.DatabaseError):
        new.executemany(_QUERIES["keep_control"], old.execute(_QUERIES["controls"]))
    new.execute(_QUERIES["recount"])
    new.execute(CONNECTION["commit"])
    return Recovery(damaged, rows, buried, lines, max(0, last_line - lines))


def _last(old: sqlite3.Connection, queries: tuple[str, ...], otherwise: int) -> int:
    """Return the first answer that one of the queries gives; a damaged file may not answer."""
    for query in queries:
        with contextlib.suppress(sqlite3.DatabaseError):
            return old.execute(_QUERIES[query]).fetchone()[0] or 0
    return otherwise


def _read(old: sqlite3.Connection, query: str, last: int) -> Iterator[tuple[Any, ...]]:
    for first in range(1, last + 1, _STRETCH):
        yield from _stretch(old, query, first, first + _STRETCH - 1)


def _stretch(old: sqlite3.Connection, query: str, first: int, last: int) -> Iterator[tuple[Any, ...]]:
    """Yield what can be read from `first` to `last`."""
    try:
        yield from old.execute(_QUERIES[query], (first, last)).fetchall()
    except sqlite3.DatabaseError:
        if first < last:
            middle = (first + last) // 2
            yield from _stretch(old, query, first, middle)
            yield from _stretch(old, query, middle + 1, last)


def _keep(new: sqlite3.Connection, row: tuple[Any, ...]) -> bool:
    """Write a row that was read, unless it is garbage: the new file's own rules and the payload's form tell."""
    *_, payload = row
    try:
        if payload:  # a row that was buried has none
            msgspec.json.decode(payload, type=Envelope)
        new.execute(_QUERIES["keep"], row[:-1])
        new.execute(_QUERIES["keep_payload"], (payload,))
    except (msgspec.MsgspecError, sqlite3.IntegrityError, TypeError):
        return False
    return True


def _keep_moved(old: sqlite3.Connection, new: sqlite3.Connection, most: int) -> int:
    """Write the moved rows, each with the key by which its id is found; returns how many it were."""
    salt = read_salt(new)
    kept = 0
    for destination, priority, submitted_by, last_error, *row in _read(old, "moved", _last(old, ("last_moved",), most)):
        common = number_of(new, (destination, priority, submitted_by, last_error))
        new.execute(SETTLED["move"], (*row[:4], common, *row[4:]))
        new.execute(SETTLED["key"], (key_of(text_of(row[2]), salt), row[0]))
        kept += 1
    return kept


def _ids(old: sqlite3.Connection) -> Iterator[str]:
    """Yield the ids of the index from both of its ends, up to what cannot be read."""
    for query in ("ids", "ids_backwards"):
        try:
            yield from (client_message_id for (client_message_id,) in old.execute(_QUERIES[query]))
        except sqlite3.DatabaseError:
            continue
        return


def _bury(new: sqlite3.Connection, client_message_id: str, now: int, new_id: Callable[[], str]) -> bool:
    """Keep an id used whose row is lost; says whether it was."""
    if new.execute(_QUERIES["is_kept"], (client_message_id,)).fetchone()[0]:
        return False
    if find_moved(new, [client_message_id], read_salt(new)):
        return False
    new.execute(_QUERIES["bury"], {"id": new_id(), "client_message_id": client_message_id, "now": now})
    new.execute(_QUERIES["keep_payload"], (b"",))
    return True
