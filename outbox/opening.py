"""Opening the outbox file: a damaged one is an operator's to save, since the ids in it must stay used."""

from __future__ import annotations

from pathlib import Path

from chassis.exits import Exit, Fatal
from chassis.sqlite import Connection
from chassis.sqlite_file import OwnedFile
from chassis.sqlite_opening import Damaged, open_owned
from outbox.migrate import migrate


async def open_file(file: OwnedFile) -> Connection:
    """Open, check and migrate the file; from here on it counts as in use.

    Raises `Fatal`: 78 for a file that only somebody's hand can make usable, 75 or 74 where the disk is full or fails.
    """
    if not file.path.exists() and file.damaged is not None:
        raise _cut_short(file.path, file.damaged)
    try:
        return await open_owned(file, migrate)
    except Damaged as fault:
        raise _damaged(file.path, str(fault)) from fault


def _cut_short(path: Path, damaged: Path) -> Fatal:
    return Fatal(
        Exit.CONFIG,
        f"there is no {path}, but {damaged.name} was set aside beside it: run `postroom outbox recover`, which saves "
        "its rows, so that no id that was used is taken for a new one",
    )


def _damaged(path: Path, fault: str) -> Fatal:
    return Fatal(
        Exit.CONFIG,
        f"{path} is damaged ({fault}): run `postroom outbox recover`, which sets it aside and saves the rows",
    )
