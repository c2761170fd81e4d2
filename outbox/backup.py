"""A copy of the outbox as of one moment, made while it is written to, and its restore (docs/backup.md).

A whole copy has no name, and exists as long as a process holds it open; the next start removes what a kill has left of
one. Sends have priority: the copy leaves `_KEPT_FREE` of the disk to them, and they wait for a few pages of it at most
(`Store.copy`).

It is restored on a stopped daemon (`postroom outbox restore`). The old outbox is set aside, never changed, and its log
too: SQLite would read the log into any file of that name.
"""

import asyncio
import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Final, Literal

from outbox import errors
from outbox.model import NAME, SCHEMA, Caller
from outbox.operations import Order
from postroom._wire.ids import now_ms
from postroom._wire.sql import load_queries
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import hand_over, open_private, sync
from postroom.chassis.sqlite import QUERIES, Damaged, exit_after, open_copy, open_still, quick_check
from postroom.chassis.store import WAL_LIMIT, OwnedFile, Store, remove

DraftKind = Literal["backup", "recovering", "restoring"]  # what a kill leaves behind, and the next start removes

_KEPT_FREE: Final = 2 * WAL_LIMIT  # bytes of the disk: for what sends and the log may take meanwhile
_SECONDS: Final = 600.0  # that a copy may take
OPERATIONS: Final = load_queries("outbox", "sql/operations.sql")
_PIECE: Final = 256 * 1024  # bytes that are read at once


class Backup:
    """A whole copy: `size` bytes, in pieces, until it is closed."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.size = os.fstat(file).st_size

    async def piece(self, offset: int) -> bytes:
        """Return the bytes from `offset` on, as many as a piece has; none at the end."""
        return await asyncio.to_thread(os.pread, self._file, _PIECE, offset)

    async def aclose(self) -> None:
        """Free the room on the disk, in a thread, since that takes long for a large copy."""
        await asyncio.to_thread(os.close, self._file)


async def back_up(store: Store) -> Backup:
    """Make a whole copy; raises `PostroomError` where it lacks room or time, and for a damaged file."""
    (size,) = await store.read(lambda db: db.execute(QUERIES["file_bytes"]).fetchone())
    directory = store.path.parent
    _check_room(directory, size)
    path = draft_of(store.path, "backup")
    try:
        path.unlink(missing_ok=True)
        file = open_private(path, os.O_RDWR | os.O_EXCL)
        try:
            try:
                with closing(open_copy(path)) as copy:
                    await store.copy(copy, partial(_go_on, directory, time.monotonic() + _SECONDS))
                await asyncio.to_thread(_check, path)
            finally:
                path.unlink()
            return Backup(file)
        except BaseException:
            await asyncio.to_thread(os.close, file)
            raise
    except Damaged as fault:
        raise errors.backup_damaged(store.path, str(fault)) from fault
    except (sqlite3.Error, OSError) as error:
        raise errors.backup_failed(error) from error


def draft_of(database: Path, kind: DraftKind) -> Path:
    """Return the name of a file that is not whole yet."""
    return database.with_name(f"{database.name}.{kind}")


def _check(path: Path) -> None:
    with closing(open_still(path)) as copy:
        quick_check(copy)


def _go_on(directory: Path, deadline: float) -> None:
    """Raise where a copy under way has to end, on the store's thread."""
    _check_room(directory, 0)
    if time.monotonic() > deadline:
        raise errors.backup_too_slow(_SECONDS)


def _check_room(directory: Path, needed: int) -> None:
    disk = os.statvfs(directory)
    free = disk.f_bavail * disk.f_frsize
    if free < needed + _KEPT_FREE:
        raise errors.no_room_for_backup(directory, needed + _KEPT_FREE, free)


def restore(directory: Path, backup: Path, reason: str) -> Path | None:
    """Make a copy of `backup` the outbox of `directory`; returns where the old one was set aside, if there was one.

    Until that is whole and on disk a failure leaves everything as it was. What waits in it may have been accepted since
    the backup, so its outcome is unknown. Raises `Fatal`, and `InvalidMessage` without a reason.
    """
    order = Order(Caller.this_process(), reason).checked()
    file = OwnedFile(directory, NAME, may_be_anothers=True)
    restored, aside, fresh = False, None, draft_of(file.path, "restoring")
    try:
        file.begin()
        if (log := Path(f"{backup}-wal")).exists():
            raise Fatal(Exit.CONFIG, f"{log} is next to {backup}: restore what `postroom outbox backup` has written")
        if backup.exists() and not backup.is_file():  # a pipe or a device may have no end
            raise Fatal(Exit.CONFIG, f"{backup} is not a file: restore what `postroom outbox backup` has written")
        now = now_ms()
        remove(fresh)  # of a restore that was cut short
        with backup.open("rb") as source, os.fdopen(open_private(fresh, os.O_WRONLY | os.O_EXCL), "wb") as target:
            hand_over(target.fileno(), file.path.parent)  # as its directory's owner's: root may restore for a daemon
            shutil.copyfileobj(source, target)
        with closing(sqlite3.connect(fresh, isolation_level=None)) as db:
            if not SCHEMA.version_of(db, backup):
                raise Fatal(Exit.CONFIG, f"{backup} is not a backup of an outbox: take another")
            quick_check(db)
            line = {"at": now, "verb": "restore", "actor": str(order.caller), "reason": order.reason.strip()}
            db.execute(OPERATIONS["log"], {**line, "row_id": None, "detail": str(backup)})
            db.execute(OPERATIONS["doubt"], {"now": now})
            db.execute(QUERIES["checkpoint_truncate"]).fetchall()
        sync(fresh)
        aside = file.clear(now)
        fresh.rename(file.path)
        sync(file.path.parent)
        restored = True
    except (Damaged, sqlite3.DatabaseError) as fault:
        if isinstance(fault, sqlite3.OperationalError):
            raise Fatal(
                exit_after(fault), f"cannot restore {backup}: {fault}; nothing has changed, try again"
            ) from fault
        raise Fatal(
            Exit.CONFIG, f"{backup} is damaged, or not a backup of an outbox ({fault}): take another"
        ) from fault
    except OSError as error:
        changed = "nothing has changed" if aside is None else f"the old outbox is {aside}"
        raise Fatal(exit_after(error), f"cannot restore {backup}: {error.strerror}; {changed}, try again") from error
    finally:
        if not restored:  # it may be large, and the disk full
            with suppress(OSError):
                remove(fresh)
        file.end(clean=restored or not file.unclean)
    return aside
