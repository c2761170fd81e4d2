"""Claims in SQLite, in transactions of the caller (sqlite.sql); needs only the standard library."""

import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar

from postroom._wire.moment import from_milliseconds
from postroom._wire.sql import load_queries
from postroom.claims import Claim, Dead, Done, Ended, Key, Result, Row, State, Table, distinct_rows, in_their_places

T = TypeVar("T")

_STEPS: Final = load_queries("postroom.claims", "sqlite.sql")


class Run(Protocol):
    """Calls a step in a transaction, with the time at which that began (seconds since the epoch)."""

    def __call__(self, step: Callable[[sqlite3.Connection, float], T], /) -> Awaitable[T]:
        """Return what the step returned."""


class SqliteClaims:
    """See `Claims`; `parts` is the table's own SQL."""

    def __init__(self, table: Table, parts: Mapping[str, str], run: Run) -> None:
        self._table = table
        self._run = run
        self._columns = (*table.key, *table.given)
        values = {column: f":{column}" for column in self._columns}
        self._steps = table.fill(
            _STEPS,
            parts,
            now=":now",
            row=", ".join(values.values()),
            key_values=", ".join(values[column] for column in table.key),
        )

    async def claim(self, wanted: Sequence[Sequence[Any]], owner: str, lease: float) -> list[State]:
        """See `Claims.claim`."""
        until = time.monotonic() + lease

        def step(db: sqlite3.Connection, now: float) -> dict[Key, State]:
            times = {"now": milliseconds(now), "until": milliseconds(now + lease)}
            fixed = {**times, "owner": owner, "expired": self._table.expired}
            states: dict[Key, State] = {}
            for key, row in distinct_rows(wanted, self._table).items():
                values = {**dict(zip(self._columns, row, strict=True)), **fixed}
                if found := db.execute(self._steps["claim"], values).fetchone():
                    attempt, last_error, end = found
                    states[key] = Claim(key, owner, attempt, last_error, from_milliseconds(end), until)
                else:
                    db.execute(self._steps["set_back"], values)
                    if kept := self._kept(db, key, now):
                        states[key] = kept.state
            return states

        return in_their_places(wanted, self._table, await self._run(step))

    async def look_up(self, keys: Sequence[Key]) -> dict[Key, Row]:
        """See `Claims.look_up`."""
        return await self._run(lambda db, now: {key: row for key in keys if (row := self._kept(db, key, now))})

    async def renew(self, held: Sequence[tuple[Key, str]], lease: float) -> list[datetime | None]:
        """See `Claims.renew`."""

        def step(db: sqlite3.Connection, now: float) -> list[datetime | None]:
            times = {"now": milliseconds(now), "until": milliseconds(now + lease)}
            rows = (
                db.execute(self._steps["renew"], {**self._named(key), **times, "owner": owner}).fetchone()
                for key, owner in held
            )
            return [row and from_milliseconds(row[0]) for row in rows]

        return await self._run(step)

    async def settle(self, ended: Sequence[Ended]) -> list[bool]:
        """See `Claims.settle`."""

        def settled(db: sqlite3.Connection, now: float, each: Ended) -> bool:
            outcome = each.outcome
            result = outcome.result if isinstance(outcome, Done) else None
            values = {
                "now": milliseconds(now),
                "owner": each.owner,
                "done": isinstance(outcome, Done),
                "reason": outcome.reason if isinstance(outcome, Dead) else None,
                "error": None if isinstance(outcome, Done) else outcome.error,
                "counts": each.counts,
                "encoding": result and result.encoding,
                "result": result and result.data,
            }
            return bool(db.execute(self._steps["settle"], {**self._named(each.key), **values}).fetchall())

        return await self._run(lambda db, now: [settled(db, now, each) for each in ended])

    def _kept(self, db: sqlite3.Connection, key: Key, now: float) -> Row | None:
        found = db.execute(self._steps["look_up"], self._named(key)).fetchone()
        if found is None:
            return None
        done, reason, encoding, data, owner, attempts, until, error = found
        result = Result(encoding, data) if encoding else None
        end, moment = from_milliseconds(until), from_milliseconds(milliseconds(now))
        return Row(bool(done), reason, owner, attempts, end, error, result, moment)

    def _named(self, key: Key) -> dict[str, Any]:
        return dict(zip(self._table.key, key, strict=True))


def milliseconds(seconds: float) -> int:
    """Return a time as a table keeps it."""
    return round(seconds * 1000)
