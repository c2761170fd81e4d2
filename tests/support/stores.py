"""A store of notes, for the tests of what every store does."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from postroom.chassis.sqlite import Schema
from postroom.chassis.store import Answers, OwnedFile, Store

SCRIPT: Final = """
CREATE TABLE note (number INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE opening (at INTEGER PRIMARY KEY);
PRAGMA application_id = 1347637321;
PRAGMA user_version = 1;
"""
SCHEMA: Final = Schema(1347637321, {1: SCRIPT})


class Refused(Exception):
    """The operation failed by itself."""


class Unknown(Exception):
    """Nobody knows whether it was done."""


class Closed(Exception):
    """The store takes nothing any more."""


class Spoiled(Exception):
    """The file is damaged."""


ANSWERS: Final = Answers(
    refused=lambda error: Refused(str(error)), unknown=lambda _, error: Unknown(error), closed=Closed
)


def spoiled(_path: Path, fault: str) -> None:
    raise Spoiled(fault)


async def open_store(directory: Path, *, file: OwnedFile | Path | None = None, **how: Any) -> Store:
    """Open the store `notes` of a directory."""
    how = {"prepare": lambda db: db.execute("INSERT INTO opening DEFAULT VALUES"), "damaged": spoiled} | how
    return await Store.open(file or OwnedFile(directory, "notes"), SCHEMA, ANSWERS, **how)


@asynccontextmanager
async def opened_store(directory: Path, **how: Any) -> AsyncIterator[Store]:
    """The same for as long as the block runs."""
    store = await open_store(directory, **how)
    try:
        yield store
    finally:
        await store.close()


def write(store: Store, number: int | None, text: str | None = "a note") -> asyncio.Task[int]:
    """Write a note; the answer is its number."""

    def insert(db: sqlite3.Connection) -> int:
        return db.execute("INSERT INTO note VALUES (?, ?)", (number, text)).lastrowid or 0

    return asyncio.ensure_future(store.write(insert, len(text or "")))


async def numbers(store: Store) -> list[int]:
    """The notes that are there."""
    return await store.run(lambda db: [row[0] for row in db.execute("SELECT number FROM note ORDER BY number")])
