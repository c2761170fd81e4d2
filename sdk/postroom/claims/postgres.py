"""Claims in Postgres: one statement for any number of keys, on any table that has them (postgres.sql)."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

import asyncpg

from postroom._wire.sql import load_queries
from postroom.claims import (
    Claim,
    Dead,
    Done,
    Ended,
    Held,
    Key,
    Result,
    Row,
    State,
    Table,
    distinct_rows,
    in_their_places,
)

_STEPS: Final = load_queries("postroom.claims", "postgres.sql")

# Runs a query; returns the rows, and when the try that succeeded began, by the clock of `Claim.until`.
Fetch: TypeAlias = Callable[..., Awaitable[tuple[Sequence[asyncpg.Record], float]]]


class PostgresClaims:
    """See `Claims`; `parts` is the table's own SQL, and `fetch` decides what an outage of Postgres means."""

    def __init__(self, table: Table, parts: Mapping[str, str], fetch: Fetch) -> None:
        self._table = table
        self._fetch = fetch

        def arrays(first: int, columns: Sequence[str]) -> str:
            return ", ".join(f"${number}::text[]" for number, _ in enumerate(columns, first))

        self._steps = table.fill(
            _STEPS,
            parts,
            now="clock_timestamp()",
            row_arrays=arrays(4, (*table.key, *table.given)),
            key_arrays=arrays(1, table.key),
            renewed_arrays=arrays(3, table.key),
            settled_arrays=arrays(8, table.key),
            wanted_key=", ".join(f"wanted.{column}" for column in table.key),
            held_key=", ".join(f"held.{column}" for column in table.key),
            verdict_key=", ".join(f"verdict.{column}" for column in table.key),
        )

    async def claim(self, wanted: Sequence[Sequence[Any]], owner: str, lease: float) -> list[State]:
        """See `Claims.claim`."""
        rows = distinct_rows(wanted, self._table)
        values = owner, timedelta(seconds=lease), self._table.expired, *_columns(rows.values())
        claimed, started = await self._fetch(self._steps["claim"], *values)
        states: dict[Key, State] = {
            key: Claim(key, owner, attempt, last_error, until, started + lease)
            for *columns, attempt, last_error, until in claimed
            for key in [tuple(columns)]
        }
        if refused := [key for key in rows if key not in states]:
            await self._fetch(self._steps["set_back"], *_columns(refused))
            found = await self.look_up(refused)
            deleted = Held(datetime.now(UTC), 0.0)  # between the two statements: free by now
            states |= {key: found[key].state if key in found else deleted for key in refused}
        return in_their_places(wanted, self._table, states)

    async def look_up(self, keys: Sequence[Key]) -> dict[Key, Row]:
        """See `Claims.look_up`."""
        rows, _ = await self._fetch(self._steps["look_up"], *_columns(keys))
        return {
            tuple(key): Row(
                done,
                reason,
                None if owner is None else str(owner),
                attempts,
                until,
                error,
                Result(encoding, data) if encoding else None,
                now,
            )
            for *key, done, reason, encoding, data, owner, attempts, until, error, now in rows
        }

    async def renew(self, held: Sequence[tuple[Key, str]], lease: float) -> list[datetime | None]:
        """See `Claims.renew`."""
        keys, owners = zip(*held, strict=True)
        rows, _ = await self._fetch(self._steps["renew"], timedelta(seconds=lease), owners, *_columns(keys))
        renewed = {row[0]: row[1] for row in rows}
        return [renewed.get(position) for position in range(1, len(held) + 1)]

    async def settle(self, ended: Sequence[Ended]) -> list[bool]:
        """See `Claims.settle`."""
        keys, owners, outcomes, counts = zip(*ended, strict=True)
        results = [(isinstance(outcome, Done) and outcome.result) or _NO_RESULT for outcome in outcomes]
        rows, _ = await self._fetch(
            self._steps["settle"],
            owners,
            [isinstance(outcome, Done) for outcome in outcomes],
            [outcome.reason if isinstance(outcome, Dead) else None for outcome in outcomes],
            [None if isinstance(outcome, Done) else outcome.error for outcome in outcomes],
            counts,
            [encoding for encoding, _ in results],
            [data for _, data in results],
            *_columns(keys),
        )
        settled = {row[0] for row in rows}
        return [position in settled for position in range(1, len(ended) + 1)]


_NO_RESULT: Final[tuple[Any, Any]] = (None, None)


def _columns(rows: Iterable[Sequence[Any]]) -> list[list[Any]]:
    return list(map(list, zip(*rows, strict=True)))
