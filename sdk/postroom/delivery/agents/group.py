"""The messages that share one transaction of the event store: what they add to it, and how each is settled after."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import datetime

from postroom.delivery.agents.decisions import Decision
from postroom.delivery.agents.envelopes import after, to_microseconds
from postroom.delivery.agents.outgoing import emitted
from postroom.delivery.agents.records import Role, encode_record, next_hash
from postroom.delivery.agents.replay import Memory
from postroom.delivery.agents.store import Attempt, Changes, Event, Key, Tried
from postroom.delivery.consumer import DONE, Attempts, Dead, Delivery, Outcome, Settle
from postroom.delivery.publishing.source import Outgoing

UNTRIED = Tried(0, "")
REFUSED = Dead("refused", "the message is of another tenant or workspace than the agent")


class Job:
    """A delivery that waits to be handled and settled."""

    __slots__ = ("_settle", "delivery", "done", "order")

    def __init__(self, delivery: Delivery, settle: Settle, done: asyncio.Future[None]) -> None:
        self.delivery = delivery
        self.done = done
        # messages are handled in the order they were published, however they were pulled
        self.order = delivery.published_at, delivery.stream, delivery.sequence
        self._settle = settle

    def __lt__(self, other: Job) -> bool:
        return self.order < other.order

    async def finish(self, outcome: Outcome) -> None:
        """Settle the delivery."""
        await self._settle(self.delivery, outcome)
        if not self.done.done():
            self.done.set_result(None)


class Group:
    """One transaction in the making; `memory` is what it would leave behind."""

    def __init__(self, memory: Memory, versions: Mapping[str, int], tried: Mapping[str, Tried]) -> None:
        self.memory = memory
        self.events: list[Event] = []
        self.outgoing: list[Outgoing] = []
        self.roles: list[Role] = []  # what became of each message that was added
        self.settled: list[tuple[Job, Outcome]] = []  # what needs nothing of the store
        self.stored: list[tuple[Job, int, Outcome]] = []  # with the position of its event
        self._versions = versions
        self._changed: dict[str, int] = {}  # versions of entities
        self._tried = dict(tried)
        self._failed: list[Attempt] = []
        self._handled: list[str] = []  # what failed before
        self._keys: dict[Key, tuple[int, Role]] = {}

    @property
    def changes(self) -> Changes:
        """What the transaction has to write."""
        return Changes(self.events, self._changed, self.memory.logical_clock, self._failed, self._handled)

    def tick(self) -> datetime:
        """Return the logical clock's next time."""
        return after(self.memory.logical_clock)

    def version(self, entity_id: str | None) -> int:
        """Return how often an entity was changed."""
        return 0 if entity_id is None else self._changed.get(entity_id, self._versions.get(entity_id, 0))

    def tried(self, message_id: str | None) -> Tried:
        """Return what came of earlier attempts at a message."""
        return UNTRIED if message_id is None else self._tried.get(message_id, UNTRIED)

    def find(self, key: Key) -> tuple[int, Role] | None:
        """Return the position of a message that this group holds already, and what became of it."""
        return self._keys.get(key)

    def add(self, job: Job, key: Key, decision: Decision) -> None:
        """Append what was decided about a message."""
        cause = self.memory.position + 1
        self._keys[key] = cause, decision.role
        self.roles.append(decision.role)
        entity_id = decision.drafts[0].envelope.entity_id
        if decision.version is not None and entity_id is not None:
            self._changed[entity_id] = decision.version
        for draft in decision.drafts:
            position, state_hash, clock, _ = self.memory
            record = encode_record(draft.record(cause if position >= cause else None), draft.payload)
            event = Event(position + 1, record, next_hash(state_hash, record))
            self.events.append(event)
            if position >= cause:
                self.outgoing.append(emitted(event.position, cause, draft))
            clock = max(clock, to_microseconds(draft.envelope.ts))
            self.memory = Memory(event.position, event.state_hash, clock, decision.state)
        self.know(job, cause, decision.role)

    def fail(self, job: Job, attempt: Attempt, attempts: Attempts) -> None:
        """Take note of an attempt that failed, and of what follows."""
        self._failed.append(attempt)
        self._tried[attempt.message_id] = Tried(attempt.number, attempt.error)
        self.settled.append((job, attempts.failed(job.delivery, attempt.number, attempt.error)))

    def know(self, job: Job, position: int, role: Role) -> None:
        """Take note of a message that the store holds: it only has to be finished, and its failed attempts are over."""
        self.stored.append((job, position, REFUSED if role == "refused" else DONE))
        if job.delivery.message_id in self._tried:
            self._handled.append(job.delivery.message_id)
