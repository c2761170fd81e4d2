"""The reports of programs in Postgres, and the counts of each minute that follow from them.

The rules are docs/contract/operate.md#operate-60 and #operate-71.

Brokers and workers write their own reports, daemons through a broker. Reports are rare, small, and may be lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Final

import msgspec

from postroom._wire.programs import AWAY_SECONDS, LATENCIES, Kind, Minute, Program, Report, ReportHead
from postroom._wire.sql import load_queries
from postroom.chassis.postgres import POSTGRES_ERRORS, Connection, Pool, count_changed
from postroom.chassis.routes import Histogram

_QUERIES: Final = load_queries(__package__, "programs.sql")
_AWAY: Final = timedelta(seconds=AWAY_SECONDS)
_KEPT: Final = timedelta(days=7)  # after the last report
_LISTED: Final = 5000
_UNREADABLE: Final = "it is of another release, whose report cannot be read here: bring the brokers to the same"
_MINUTES_KEPT: Final = timedelta(days=1)
_COUNTED: Final = ("accepted", "handled", "dead_lettered")
_LATENCIES: Final = [f"handled_in_{place}" for place in range(len(LATENCIES) + 1)]


async def keep_report(connection: Connection | Pool, kind: Kind, mesh: str, name: str, report: ReportHead) -> None:
    """Keep a program's report, which replaces its last one; of one that cannot be read, its head."""
    said = msgspec.json.encode(report).decode()
    process = kind, mesh, name, report.host, report.pid, report.address
    await connection.execute(_QUERIES["keep_report"], *process, report.at, said, _AWAY)


class PostgresReports:
    """The reports of a process that has Postgres: `keep` each, and `withdraw` the last one when it stops."""

    def __init__(self, pool: Pool, kind: Kind, name: str) -> None:
        self._pool = pool
        self._kind = kind
        self._name = name[:255]
        self._last: Report | None = None

    async def keep(self, report: Report) -> None:
        """Write it, and how much its counts grew since the last one; an outage of Postgres is ignored."""
        before = {} if self._last is None else self._last.totals
        grown = {name: more for name, count in report.totals.items() if (more := count - before.get(name, 0))}
        with suppress(*POSTGRES_ERRORS):
            await keep_report(self._pool, self._kind, "", self._name, report)
            if grown:
                await self._pool.execute(_QUERIES["count_minute"], list(grown), list(grown.values()))
            self._last = report

    async def withdraw(self) -> None:
        """Delete the report of a process that stops as it was asked to, so that it is not shown as missing."""
        if self._last is not None:
            with suppress(*POSTGRES_ERRORS):
                process = self._kind, self._name, self._last.host, self._last.pid
                await self._pool.execute(_QUERIES["withdraw_report"], *process)


async def list_programs(connection: Connection, mesh: str | None) -> list[Program]:
    """Return the programs of a mesh, or those of all meshes; one whose report cannot be read is listed as degraded."""
    found = []
    for row in await connection.fetch(_QUERIES["list_programs"], mesh, _AWAY, _LISTED):
        said, known = msgspec.json.decode(row["report"]), dict(row)
        try:
            program = msgspec.convert({**said, **known}, Program)
        except msgspec.ValidationError:  # a program of another release may say what this one does not know
            known |= {"version": str(said.get("version"))[:255], "started_at": row["reported_at"]}
            known |= {"at": row["reported_at"], "status": "degraded", "reasons": [_UNREADABLE]}
            program = msgspec.convert(known, Program)
        found.append(program)
    return found


async def list_minutes(connection: Connection, last: int) -> list[Minute]:
    """Return the last minutes, of all programs together."""
    found = []
    for row in await connection.fetch(_QUERIES["list_minutes"], last):
        counts = msgspec.json.decode(row["counts"], type=dict[str, int])
        took = [counts.get(name, 0) for name in _LATENCIES]
        sums = {name: counts.get(name, 0) for name in _COUNTED}
        found.append(Minute(at=row["at"], **sums, p50=_quantile(took, 0.5), p99=_quantile(took, 0.99)))
    return found


def _quantile(counts: Sequence[int], share: float) -> float | None:
    """Estimate the seconds that a `share` of all does not exceed; what is above the last bound counts as that bound."""
    left = share * sum(counts)
    for count, (least, most) in zip(counts, pairwise((0.0, *LATENCIES)), strict=False):
        if count and left <= count:
            return least + (most - least) * left / count
        left -= count
    return LATENCIES[-1] if any(counts) else None


async def sweep_minutes(connection: Connection, rows: int) -> int:
    """Delete up to `rows` counts of minutes that ended more than a day ago; return how many those were."""
    return await count_changed(connection, _QUERIES["sweep_minutes"], rows, _MINUTES_KEPT)


def latency_totals(*took: Histogram) -> dict[str, int]:
    """Return how long messages took until they were handled, by `LATENCIES`, in the form of a report."""
    return dict(zip(_LATENCIES, map(sum, zip(*(one.counts for one in took), strict=True)), strict=True))


async def forget_daemons(connection: Connection, mesh: str, member: str | None = None) -> None:
    """Delete the reports of the daemons of a mesh, or of a member of it, that was deleted."""
    await connection.execute(_QUERIES["forget_daemons"], mesh, member)


async def sweep_programs(connection: Connection, rows: int) -> int:
    """Delete up to `rows` reports of programs that have been silent for a week; return how many those were."""
    return await count_changed(connection, _QUERIES["sweep_programs"], rows, _KEPT)
