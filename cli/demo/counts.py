"""The demo's last act: count in both databases what was reported to the callers, and compare the numbers."""

import asyncio
import json
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

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


class Database(ABC):
    """Something that is counted, by named queries."""

    @abstractmethod
    def ask(self, query: str, *values: Any) -> Iterable[Sequence[Any]]:
        """Return the rows of a query."""

    def count(self, query: str, *values: Any) -> int:
        """Return the number that a query finds."""
        ((number,),) = self.ask(query, *values)
        return int(number)

    @property
    def accepted(self) -> dict[str, bytes]:
        """What was accepted: the fingerprint of each client_message_id."""
        return {key: bytes(fingerprint) for key, fingerprint in self.ask("accepted")}


class Outbox(Database):
    """The file of a daemon that has stopped."""

    def __init__(self, file: Path) -> None:
        self._address = f"{file.as_uri()}?mode=ro"

    def ask(self, query: str, *ids: str) -> list[Sequence[Any]]:
        """Return the rows of a query, perhaps about the rows with these ids."""
        with closing(sqlite3.connect(self._address, uri=True)) as connection:
            return connection.execute(_OUTBOX[query], {"ids": json.dumps(ids)}).fetchall()


class Broker(Database):
    """The broker's database."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, query: str, *values: Any) -> list[Sequence[Any]]:
        """Return the rows of a query."""

        async def fetch() -> list[Sequence[Any]]:
            connection = await asyncpg.connect(self._url)
            try:
                return list(map(tuple, await connection.fetch(_BROKER[query], *values)))
            finally:
                await connection.close()

        return asyncio.run(fetch())


def compare(
    reported: Reported,
    outbox: Outbox,
    broker: Broker,
    *,
    sends: int,
    to_topic: int,
    kept: int,
    events: int,
    answers: int,
    unburied: int,
) -> list[Line]:
    """Count everything, and compare it with what was meant.

    `sends` are those under ids of their own; of what is accepted in the end `to_topic` are for the topic, and `kept`
    for the queue and the member that have no reader in the demo. The handler has had `events` of the topic and
    `answers` of the agent, and has handled `unburied` messages that it could not read at first.
    """
    again, dead = reported.sent_again, reported.dead
    requeued, commands = len(reported.requeued), len(reported.commands)
    arrived = sends - len(dead) + requeued
    missing_here = set(reported.sent) - outbox.accepted.keys() - set(dead)
    return [
        Line("sent", "sent and acknowledged",
             Count(len(set(reported.sent)), sends), Count(outbox.count("first_rows"), sends),
             Count(len(broker.accepted.keys() & set(reported.sent)), sends - len(dead))),
        Line("accepted", "committed by the broker, and its history",
             Count(len(set(reported.sent)) - len(dead) + requeued, arrived), Count(len(outbox.accepted), arrived),
             Count(broker.count("history"), arrived)),
        Line("duplicates", "sent again, still there once",
             Count(reported.duplicates, len(again)), Count(outbox.count("rows_with_ids", *again), len(again)),
             Count(broker.count("history_of_ids", again), len(again))),
        Line("dead", "refused permanently, never accepted",
             Count(len(dead), 1), Count(outbox.count("died"), 1), Count(broker.count("history_of_ids", dead), 0)),
        Line("requeued", "repaired under a fresh id, then accepted",
             Count(requeued, 1), Count(outbox.count("requeued"), 1),
             Count(broker.count("history_of_ids", reported.requeued), 1)),
        Line("handled", "to the topic; each had its effect at the handler, once",
             Count(events, to_topic), Count(outbox.count("done_to_topics"), to_topic),
             Count(broker.count("processed", f"{MESH}.event.{TOPIC}.v1"), to_topic)),
        Line("answered", "commands, each answered by the agent, once",
             Count(answers, commands), Count(outbox.count("rows_with_ids", *reported.commands), commands),
             Count(broker.count("processed", f"{MESH}.event.{ANSWER}.v1"), commands)),
        Line("kept", "to a queue and a member without a reader here",
             Count(arrived - to_topic - commands, kept),
             Count(outbox.count("done_to_others") - outbox.count("rows_with_ids", *reported.commands), kept),
             Count(broker.count("history_of_others") - commands, kept)),
        Line("replayed", "dead at the handler, handled after its repair",
             Count(unburied, 1), Count(outbox.count("rows_with_ids", reported.buried), 1),
             Count(broker.count("buried"), 1)),
        Line("lost", "acknowledged, but not there byte for byte",
             Count(len(missing_here), 0), Count(outbox.count("unsettled"), 0), Count(differing(outbox, broker), 0)),
    ]  # fmt: skip


def differing(outbox: Outbox, broker: Broker) -> int:
    """Count what is in one of both alone, or not byte for byte the same in the other."""
    here, there = outbox.accepted, broker.accepted
    return sum(here.get(key) != there.get(key) for key in here.keys() | there.keys())
