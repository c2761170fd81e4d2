"""Building an agent's state from its store, and checking the chain of hashes on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from postroom._wire.failures import tell
from postroom.agent import Agent
from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.agents.clock import to_microseconds
from postroom.delivery.agents.records import NO_HASH, Record, decode_record, next_hash
from postroom.delivery.agents.store import Event


class Memory(NamedTuple):
    """An agent's state, and where in the store it stands."""

    position: int
    state_hash: bytes
    logical_clock: int  # µs since the epoch: the latest time that any event had
    state: Any


class Differs(Exception):
    """The store does not say what it said when it was written: `position` is the first event that differs."""

    def __init__(self, position: int, why: str) -> None:
        super().__init__(f"position {position}: {why}")
        self.position = position


def empty(agent: Agent[Any]) -> Memory:
    """Return the memory of an agent that has handled nothing."""
    return Memory(0, NO_HASH, 0, agent.initial_state())


def rebuild(agent: Agent[Any], memory: Memory, events: Iterable[Event]) -> Memory:
    """Go on from `memory` with the events that follow it; raises `Differs`, or `Fatal` (78) where `apply` raises."""
    position, state_hash, clock, state = memory
    for event in events:
        record = check(event, position + 1, state_hash)
        position, state_hash = event.position, event.state_hash
        clock = max(clock, to_microseconds(record.envelope.ts))
        if record.changes_state:
            try:
                state = agent.apply(state, record.envelope)
            except Exception as error:
                detail = f"{type(agent).__name__}.apply raised at the event of position {position}: {tell(error)}"
                rule = "the store is unchanged: let `apply` accept that event, and start again"
                raise Fatal(Exit.CONFIG, f"{detail}; {rule}") from error
    return Memory(position, state_hash, clock, state)


def check(event: Event, position: int, previous: bytes) -> Record:
    """Return the record of the event that should stand at `position`, after the state hash `previous`."""
    if event.position != position:
        raise Differs(position, f"there is no such event; the next is {event.position}")
    if next_hash(previous, event.record) != event.state_hash:
        raise Differs(position, "the record does not match the state hash that was stored with it")
    try:
        return decode_record(event.record)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Differs(position, f"the record cannot be read: {error}") from error
