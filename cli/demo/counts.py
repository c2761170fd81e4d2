"""The demo's last act: count in both databases what was reported to the callers, and compare the numbers."""

import asyncio
import json
import sqlite3
from collections.abc import Collection, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Self

import asyncpg

from cli.stack.layout import MESH
from postroom._wire.sql import load_queries

TOPIC: Final = "orders"  # where the events go
ANSWER: Final = "command_counted"  # the event that the agent answers with
_OUTBOX: Final = load_queries("cli.demo", "outbox.sql")
_BROKER: Final = load_queries("cli.demo", "broker.sql")


@dataclass
class Reported:
    """What the answers to the demo's clients reported."""

    sent: list[str] = field(default_factory=list)  # ids that the daemon acknowledged
    sent_again: list[str] = field(default_factory=list)  # ids that were sent a second time
    duplicates: int = 0  # answers that called them duplicates
    dead: list[str] = field(default_factory=list)
    requeued: list[str] = field(default_factory=list)  # the successors' ids
    commands: list[str] = field(default_factory=list)  # ids of what was sent to the agent
    buried: str = ""  # id of the message that the handler could not read


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
    """One line of the table: what was reported to the callers, what SQLite holds, what Postgres holds."""

    name: str
    meaning: str
    reported: Count
    outbox: Count
    broker: Count

    @property
    def holds(self) -> bool:
        """Whether all three agree with what they should be."""
        return self.reported.holds and self.outbox.holds and self.broker.holds


class Meant(NamedTuple):
    """What the demo set out to do."""

    sends: int  # under ids of their own
    to_topic: int  # of what is accepted in the end
    kept: int  # of it, for the queue and the member that have no reader in the demo


class Handled(NamedTuple):
    """What the handler did."""

    events: int  # of the topic
    answers: int  # of the agent
    buried: int  # the one that it could not read at first


Accepted = dict[str, bytes]  # client_message_id → fingerprint


class Outbox(NamedTuple):
    """What the daemon's file holds."""

    first_rows: int
    sent_again: int
    died: int
    requeued: int
    unsettled: int
    accepted: Accepted
    to_topic: int
    to_others: int
    commands: int
    buried: int

    @classmethod
    def read(cls, file: Path, reported: Reported) -> Self:
        """Count in the file of a daemon that has stopped."""
        with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:

            def count(query: str, ids: Collection[str] = ()) -> int:
                (number,) = connection.execute(_OUTBOX[query], {"ids": json.dumps(list(ids))}).fetchone()
                return int(number)

            return cls(
                first_rows=count("first_rows"),
                sent_again=count("rows_with_ids", reported.sent_again),
                died=count("died"),
                requeued=count("requeued"),
                unsettled=count("unsettled"),
                accepted=_accepted(connection.execute(_OUTBOX["accepted"])),
                to_topic=count("done_to_topics"),
                to_others=count("done_to_others"),
                commands=count("rows_with_ids", reported.commands),
                buried=count("rows_with_ids", [reported.buried]),
            )


class Broker(NamedTuple):
    """What the broker's database holds."""

    accepted: Accepted
    history: int
    sent_again: int
    died: int
    requeued: int
    processed: int
    to_others: int
    answered: int
    buried: int

    @classmethod
    async def read(cls, url: str, reported: Reported) -> Self:
        """Count in the database."""
        connection = await asyncpg.connect(url)
        try:
            return cls(
                accepted=_accepted(map(tuple, await connection.fetch(_BROKER["accepted"]))),
                history=await connection.fetchval(_BROKER["history"]),
                sent_again=await connection.fetchval(_BROKER["history_of_ids"], reported.sent_again),
                died=await connection.fetchval(_BROKER["history_of_ids"], reported.dead),
                requeued=await connection.fetchval(_BROKER["history_of_ids"], reported.requeued),
                processed=await connection.fetchval(_BROKER["processed"], f"{MESH}.event.{TOPIC}.v1"),
                to_others=await connection.fetchval(_BROKER["history_of_others"]),
                answered=await connection.fetchval(_BROKER["processed"], f"{MESH}.event.{ANSWER}.v1"),
                buried=await connection.fetchval(_BROKER["buried"]),
            )
        finally:
            await connection.close()


def compare(reported: Reported, handled: Handled, outbox_file: Path, database_url: str, meant: Meant) -> list[Line]:
    """Count everything, and compare it with what was `meant`. The daemon must have stopped."""
    outbox = Outbox.read(outbox_file, reported)
    broker = asyncio.run(Broker.read(database_url, reported))
    again, dead = len(reported.sent_again), len(reported.dead)
    requeued, commands = len(reported.requeued), len(reported.commands)
    arrived = meant.sends - dead + requeued
    to_topic = meant.to_topic
    missing_here = set(reported.sent) - outbox.accepted.keys() - set(reported.dead)
    return [
        Line(
            "sent",
            "sent and acknowledged",
            Count(len(set(reported.sent)), meant.sends),
            Count(outbox.first_rows, meant.sends),
            Count(len(broker.accepted.keys() & set(reported.sent)), meant.sends - dead),
        ),
        Line(
            "accepted",
            "committed by the broker, and its history",
            Count(len(set(reported.sent)) - dead + requeued, arrived),
            Count(len(outbox.accepted), arrived),
            Count(broker.history, arrived),
        ),
        Line(
            "duplicates",
            "sent again, still there once",
            Count(reported.duplicates, again),
            Count(outbox.sent_again, again),
            Count(broker.sent_again, again),
        ),
        Line(
            "dead", "refused permanently, never accepted", Count(dead, 1), Count(outbox.died, 1), Count(broker.died, 0)
        ),
        Line(
            "requeued",
            "repaired under a fresh id, then accepted",
            Count(requeued, 1),
            Count(outbox.requeued, 1),
            Count(broker.requeued, 1),
        ),
        Line(
            "handled",
            "to the topic; each had its effect at the handler, once",
            Count(handled.events, to_topic),
            Count(outbox.to_topic, to_topic),
            Count(broker.processed, to_topic),
        ),
        Line(
            "answered",
            "commands, each answered by the agent, once",
            Count(handled.answers, commands),
            Count(outbox.commands, commands),
            Count(broker.answered, commands),
        ),
        Line(
            "kept",
            "to a queue and a member without a reader here",
            Count(arrived - to_topic - commands, meant.kept),
            Count(outbox.to_others - outbox.commands, meant.kept),
            Count(broker.to_others - commands, meant.kept),
        ),
        Line(
            "replayed",
            "dead at the handler, handled after its repair",
            Count(handled.buried, 1),
            Count(outbox.buried, 1),
            Count(broker.buried, 1),
        ),
        Line(
            "lost",
            "acknowledged, but not there byte for byte",
            Count(len(missing_here), 0),
            Count(outbox.unsettled, 0),
            Count(differing(outbox, broker), 0),
        ),
    ]


def differing(outbox: Outbox, broker: Broker) -> int:
    """Count what is in one of both alone, or not byte for byte the same in the other."""
    keys = outbox.accepted.keys() | broker.accepted.keys()
    return sum(outbox.accepted.get(key) != broker.accepted.get(key) for key in keys)


def _accepted(rows: Iterable[tuple[str, bytes]]) -> Accepted:
    return {key: bytes(fingerprint) for key, fingerprint in rows}
