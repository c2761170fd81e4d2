"""The outbox beside a model of it: whatever is done in whatever order, both hold the same rows."""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.outboxes import ALICE, WHY, Clock, counted, dead, done, retry, send

from outbox import AcceptedRow, Outbox, RowFilter
from outbox.model import Accepted, Unanswered
from outbox.operations import why_not
from postroom._wire.operations import VERBS, Verb
from postroom.errors import Conflict

IDS = st.sampled_from([f"id-{number}" for number in range(12)])
DESTINATIONS = ["topic:orders", "dm:bob", "queue:work"]
RANK = {"now": 0, "next": 1, "low": 2}
SENDS = st.builds(
    send,
    IDS,
    st.sampled_from(["hello", "else"]),
    to=st.sampled_from(DESTINATIONS),
    priority=st.sampled_from(list(RANK)),
)


@dataclass
class Row:
    """What the model knows of a row; `place` is its age."""

    place: int
    fingerprint: bytes
    priority: str
    destination: str
    enqueued_at: int
    due: int
    status: str = "pending"
    held: bool = False
    attempts: int = 0
    unanswered: bool = False
    had: bool = False  # the broker accepted it, and its answer was lost


class Model(RuleBasedStateMachine):
    """Every rule does one thing to the outbox and to the model, and compares the answers."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.numbers = count(1)
        self.rows: dict[str, Row] = {}
        self.ids: dict[str, str] = {}  # row id by client_message_id
        self.open()

    def open(self) -> None:
        directory = Path(self.directory.name)
        self.outbox = self.do(Outbox.open(directory, clock=self.clock, new_ids=self.new_ids, look_up=self.look_up))

    def new_ids(self, count: int) -> list[str]:
        return [f"ROW{next(self.numbers):09d}" for _ in range(count)]

    async def look_up(self, rows: Sequence[Unanswered]) -> list[Accepted | None]:
        return [Accepted("BROKER-1", 7) if self.rows[row.client_message_id].had else None for row in rows]

    def do(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def teardown(self) -> None:
        self.do(self.outbox.close())
        self.runner.close()
        self.directory.cleanup()

    @rule(sends=st.lists(SENDS, min_size=1, max_size=6))
    def accept(self, sends: list[Any]) -> None:
        outcomes = self.do(self.outbox.accept(sends, ALICE))
        for asked, outcome in zip(sends, outcomes, strict=True):
            assert isinstance(outcome, AcceptedRow)
            row = self.rows.get(asked.client_message_id)
            assert outcome.inserted == (row is None)
            if row is None:
                self.add(asked.client_message_id, outcome.row_id, asked.fingerprint, asked.priority, asked.destination)
            else:
                assert (outcome.status, outcome.fingerprint) == (row.status, row.fingerprint)

    def add(self, name: str, row_id: str, fingerprint: bytes, priority: str, destination: str) -> None:
        now = self.clock.now
        self.rows[name] = Row(len(self.rows), fingerprint, priority, destination, now, now)
        self.ids[name] = row_id

    @rule(limit=st.integers(1, 6), excluded=st.sets(st.sampled_from(DESTINATIONS), max_size=2))
    def claim(self, limit: int, excluded: set[str]) -> None:
        claimed = self.do(self.outbox.claim(limit=limit, excluded=excluded))
        due = [
            name
            for name, row in self.rows.items()
            if row.status == "pending"
            and not row.held
            and row.due <= self.clock.now
            and row.destination not in excluded
        ]
        due.sort(key=lambda name: (RANK[self.rows[name].priority], self.rows[name].place))
        assert [row.client_message_id for row in claimed] == due[:limit]
        for row in claimed:
            assert row.attempts == self.rows[row.client_message_id].attempts
            self.rows[row.client_message_id].status = "inflight"

    @rule(names=st.lists(IDS, unique=True, min_size=1, max_size=6), answer=st.sampled_from(["done", "dead", "pending"]))
    def settle(self, names: list[str], answer: str) -> None:
        at = self.clock.now + 5_000
        make = {"done": done, "dead": dead, "pending": lambda row_id: retry(row_id, 5_000)}[answer]
        known = [name for name in names if name in self.ids]
        settled = self.do(self.outbox.settle([make(self.ids[name]) for name in known]))
        inflight = [self.rows[name] for name in known if self.rows[name].status == "inflight"]
        assert settled == len(inflight)
        for row in inflight:
            row.status = answer
            row.attempts += 1
            row.due = at if answer == "pending" else row.due
            row.unanswered = row.unanswered and answer == "pending"

    @rule(name=IDS, verb=st.sampled_from(list(VERBS)))
    def operate(self, name: str, verb: Verb) -> None:
        if name not in self.rows:
            return
        row = self.rows[name]
        allowed = why_not(verb, row.status, held=row.held) is None  # type: ignore[arg-type]
        if not allowed:
            with pytest.raises(Conflict):
                self.do(self.outbox.act(verb, self.ids[name], **WHY))
            return
        if VERBS[verb].retires and row.unanswered:
            row.unanswered = False
            if row.had:
                with pytest.raises(Conflict, match="had accepted it"):
                    self.do(self.outbox.act(verb, self.ids[name], **WHY))
                row.status, row.held = "done", False
                return
        answer = self.do(self.outbox.act(verb, self.ids[name], **WHY))
        if verb == "requeue":
            self.add(answer.client_message_id, answer.id, row.fingerprint, row.priority, row.destination)
            self.rows[answer.client_message_id].held = row.held
        if VERBS[verb].retires:
            row.status, row.held = "aborted", False
        if verb in ("hold", "release"):
            row.held = verb == "hold"
        if verb == "flush":
            row.due = self.clock.now

    @rule(seconds=st.sampled_from([1, 4, 60]))
    def time_passes(self, seconds: int) -> None:
        self.clock.forward(seconds)

    @rule(age=st.sampled_from([30, 100]))
    def expire(self, age: int) -> None:
        before = self.clock.now - age * 1000
        expired = [row for row in self.rows.values() if row.status == "pending" and row.enqueued_at < before]
        assert self.do(self.outbox.expire(before)) == len(expired)
        for row in expired:
            row.status, row.held = "dead", False

    @rule()
    def prune(self) -> None:
        self.do(self.outbox.prune(self.clock.now - 50_000, **WHY))

    @rule(had=st.booleans())
    def restart(self, had: bool) -> None:  # noqa: FBT001 - hypothesis draws it
        self.do(self.outbox.close())
        self.open()
        for name, row in self.rows.items():
            if row.status == "inflight":
                self.rows[name] = replace(
                    row, status="pending", attempts=row.attempts + 1, unanswered=True, had=row.had or had
                )

    @invariant()
    def both_hold_the_same_rows(self) -> None:
        page = self.do(self.outbox.list_rows(RowFilter(), limit=1000))
        found = {
            row.client_message_id: (row.status, row.held, row.attempts, row.unanswered_at is not None)
            for row in page.rows
        }
        assert found == {name: (row.status, row.held, row.attempts, row.unanswered) for name, row in self.rows.items()}

    @invariant()
    def the_kept_counters_are_right(self) -> None:
        counts = self.do(self.outbox.counts())
        rows = self.do(self.outbox.list_rows(RowFilter(), limit=1000)).rows
        assert counts.rows == counted(Path(self.directory.name) / "outbox.db")
        assert counts.payload_bytes == sum(row.payload_bytes for row in rows)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=25, stateful_step_count=30)
