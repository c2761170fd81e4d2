"""A copy of the outbox as it is at one moment, made while it is written to (docs/backup.md).

Once it is whole it has no name, and ends with whoever holds it open; what a daemon that was killed has left of one the
next start removes. Sends come first: the copy leaves `_KEPT_FREE` of the disk to them, and they wait for a few pages of
it at most (`Store.copy`).
"""

import asyncio
import os
import sqlite3
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from outbox import errors
from postroom.chassis.ownership import open_private
from postroom.chassis.sqlite import QUERIES, Damaged, open_copy, open_still, quick_check
from postroom.chassis.store import WAL_LIMIT, Store

_KEPT_FREE: Final = 2 * WAL_LIMIT  # bytes of the disk: for what sends and the log may take meanwhile
_SECONDS: Final = 600.0  # that a copy may take
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
        """Give the room on the disk back, which takes as long as the copy is large: nobody waits for it."""
        await asyncio.to_thread(os.close, self._file)


async def back_up(store: Store) -> Backup:
    """Make a whole copy; raises `PostroomError` where there is no room or no time for it, and for a damaged file."""
    (size,) = await store.read(lambda db: db.execute(QUERIES["file_bytes"]).fetchone())
    directory = store.path.parent
    _check_room(directory, size)
    path = draft_of(store.path)
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


def draft_of(database: Path) -> Path:
    """Return the name of a copy that is not whole yet."""
    return database.with_name(f"{database.name}.backup")


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
