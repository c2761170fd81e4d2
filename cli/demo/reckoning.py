"""The demo's last act: count in both databases what the callers were told, and hold the numbers against each other."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import asyncpg

from chassis.sql import load_queries

_OUTBOX: Final = load_queries("cli.demo", "outbox.sql")
_BROKER: Final = load_queries("cli.demo", "broker.sql")


@dataclass
class Told:
    """What the demo was told by answers, as it went."""

    sent: list[str] = field(default_factory=list)  # ids that the daemon acknowledged
    sent_again: list[str] = field(default_factory=list)  # ids that were sent a second time
    duplicates: int = 0  # answers that called them duplicates
    dead: list[str] = field(default_factory=list)
    requeued: list[str] = field(default_factory=list)  # the successors' ids


class Count(NamedTuple):
    """A number found, and the number that it should be."""

    found: int
    expected: int

    def __str__(self) -> str:
        return f"{self.found:,}" if self.holds else f"{self.found:,}, not {self.expected:,}"

    @property
    def holds(self) -> bool:
        """Whether they agree."""
        return self.found == self.expected


class Line(NamedTuple):
    """One line of the table: what callers were told, what SQLite holds, what Postgres holds."""

    name: str
    meaning: str
    told: Count
    outbox: Count
    broker: Count

    @property
    def holds(self) -> bool:
        """Whether all three agree with what they should be."""
        return self.told.holds and self.outbox.holds and self.broker.holds


Accepted = dict[str, bytes]  # client_message_id → fingerprint


class Outbox(NamedTuple):
    """What the daemon's file holds."""

    first_rows: int
    sent_again: int
    died: int
    requeued: int
    unsettled: int
    accepted: Accepted


class Broker(NamedTuple):
    """What the broker's database holds."""

    accepted: Accepted
    history: int
    sent_again: int
    died: int
    requeued: int


def reckon(told: Told, outbox_file: Path, database_url: str, events: int) -> list[Line]:
    """Count everything; `events` are the messages handed in under ids of their own. The daemon must have stopped."""
    outbox = _read_outbox(outbox_file, told)
    broker = asyncio.run(_read_broker(database_url, told))
    return compare(told, outbox, broker, events)


def compare(told: Told, outbox: Outbox, broker: Broker, events: int) -> list[Line]:
    """Hold what was told and what both databases hold against what they should be."""
    again, dead, requeued = len(told.sent_again), len(told.dead), len(told.requeued)
    arrived = events - dead + requeued
    missing_here = set(told.sent) - outbox.accepted.keys() - set(told.dead)
    return [
        Line(
            "sent",
            "handed in and acknowledged",
            Count(len(set(told.sent)), events),
            Count(outbox.first_rows, events),
            Count(len(broker.accepted.keys() & set(told.sent)), events - dead),
        ),
        Line(
            "accepted",
            "committed by the broker, and its history",
            Count(len(set(told.sent)) - dead + requeued, arrived),
            Count(len(outbox.accepted), arrived),
            Count(broker.history, arrived),
        ),
        Line(
            "duplicates",
            "sent again, still there once",
            Count(told.duplicates, again),
            Count(outbox.sent_again, again),
            Count(broker.sent_again, again),
        ),
        Line("dead", "refused for good, never accepted", Count(dead, 1), Count(outbox.died, 1), Count(broker.died, 0)),
        Line(
            "requeued",
            "repaired under a fresh id, then accepted",
            Count(requeued, 1),
            Count(outbox.requeued, 1),
            Count(broker.requeued, 1),
        ),
        Line(
            "lost",
            "acknowledged, but not there byte for byte",
            Count(len(missing_here), 0),
            Count(outbox.unsettled, 0),
            Count(_differences(outbox.accepted, broker.accepted), 0),
        ),
    ]


def _differences(one: Accepted, other: Accepted) -> int:
    """Count the ids that only one side has, or that the two have with another fingerprint."""
    return sum(one.get(key) != other.get(key) for key in one.keys() | other.keys())


def _read_outbox(file: Path, told: Told) -> Outbox:
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:

        def count(query: str, ids: Collection[str] = ()) -> int:
            (number,) = connection.execute(_OUTBOX[query], {"ids": json.dumps(list(ids))}).fetchone()
            return int(number)

        return Outbox(
            first_rows=count("first_rows"),
            sent_again=count("rows_with_ids", told.sent_again),
            died=count("died"),
            requeued=count("requeued"),
            unsettled=count("unsettled"),
            accepted=_accepted(connection.execute(_OUTBOX["accepted"])),
        )


async def _read_broker(url: str, told: Told) -> Broker:
    connection = await asyncpg.connect(url)
    try:
        return Broker(
            accepted=_accepted(map(tuple, await connection.fetch(_BROKER["accepted"]))),
            history=await connection.fetchval(_BROKER["history"]),
            sent_again=await connection.fetchval(_BROKER["history_of_ids"], told.sent_again),
            died=await connection.fetchval(_BROKER["history_of_ids"], told.dead),
            requeued=await connection.fetchval(_BROKER["history_of_ids"], told.requeued),
        )
    finally:
        await connection.close()


def _accepted(rows: Iterable[tuple[str, bytes]]) -> Accepted:
    return {key: bytes(fingerprint) for key, fingerprint in rows}
