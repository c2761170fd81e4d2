"""A baseline: how fast this disk and this SQLite commit rows of an outbox, with nothing around them."""

from __future__ import annotations

import sqlite3
import time
from itertools import count
from pathlib import Path
from typing import Final

from postroom._wire.sql import load_queries

PAYLOAD: Final = b"x" * 1100
_QUERIES: Final = load_queries("bench", "raw.sql")


def rows_per_second(directory: Path, *, rows_a_commit: int, seconds: float) -> float:
    """Commit `rows_a_commit` rows at a time (WAL, synchronous=FULL, ids in time order) for `seconds`."""
    database = sqlite3.connect(directory / f"raw-{rows_a_commit}.db", isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    database.executescript(_QUERIES["create"])
    numbers = count()
    began, rows = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        batch = [_row(next(numbers)) for _ in range(rows_a_commit)]
        database.execute("BEGIN IMMEDIATE")
        database.executemany(_QUERIES["insert"], batch)
        database.execute("COMMIT")
        rows += rows_a_commit
    database.close()
    return rows / took


def _row(number: int) -> dict[str, object]:
    name = f"01J{number:023d}"
    return {
        "id": name,
        "client_message_id": name,
        "fingerprint": b"f" * 32,
        "payload": PAYLOAD,
        "now": 1_700_000_000_000,
    }
