"""Looking at an event store, also while its agent runs: `postroom agent replay` and `postroom agent verify`.

Both only read; nothing is published and nothing is handled.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from postroom.agent import Agent
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.sqlite import in_snapshot, open_reader
from postroom.chassis.store import Connection
from postroom.delivery.agents.rebuilding import Differs, Memory, check, empty, rebuild
from postroom.delivery.agents.records import NO_HASH
from postroom.delivery.agents.store import Head, Owner, read_events, read_head, read_owner

T = TypeVar("T")


class Verified(NamedTuple):
    """What a store says of itself: `first_difference` is the first position that is not what was written."""

    owner: Owner
    head: Head
    first_difference: int | None
    why: str | None


async def owner_of(database: Path) -> Owner:
    """Return whose store it is; raises `Fatal` where there is none, or nobody's."""
    return await _read(database, lambda owner, _: owner)


async def replay(agent_class: type[Agent[Any]], database: Path) -> tuple[Owner, Memory]:
    """Build the agent's state from its store alone; raises `Differs` where the store was altered."""
    return await _read(database, partial(_replay, agent_class))


async def verify(database: Path) -> Verified:
    """Compute the chain of hashes anew and compare it with the one that was stored."""
    return await _read(database, _verify)


def _replay(agent_class: type[Agent[Any]], owner: Owner, db: sqlite3.Connection) -> tuple[Owner, Memory]:
    agent = agent_class()
    agent.tenant, agent.workspace = owner.tenant, owner.workspace
    return owner, rebuild(agent, empty(agent), read_events(db))


def _verify(owner: Owner, db: sqlite3.Connection) -> Verified:
    head = read_head(db)
    try:
        _check_all(db, head)
    except Differs as difference:
        return Verified(owner, head, difference.position, str(difference))
    return Verified(owner, head, None, None)


def _check_all(db: sqlite3.Connection, head: Head) -> None:
    position, state_hash = 0, NO_HASH
    for event in read_events(db):
        check(event, position + 1, state_hash)
        position, state_hash = event.position, event.state_hash
    if position != head.position:
        raise Differs(position + 1, f"the state is at position {head.position}, but the events end at {position}")
    if state_hash != head.state_hash:
        raise Differs(position, "the hash of the state is not that of the event")


async def _read(database: Path, read: Callable[[Owner, sqlite3.Connection], T]) -> T:
    if not database.exists():  # noqa: ASYNC240 - before anything else runs
        raise Fatal(Exit.NOT_FOUND, f"there is no event store {database}")
    try:
        connection = await Connection.open(partial(open_reader, database))
        try:
            return await connection.run(lambda db: in_snapshot(db, lambda: _owned(db, database, read)))
        finally:
            await connection.close()
    except sqlite3.Error as error:
        raise Fatal(Exit.FAILED, f"cannot read {database}: {error}") from error


def _owned(db: sqlite3.Connection, database: Path, read: Callable[[Owner, sqlite3.Connection], T]) -> T:
    owner = read_owner(db)
    if owner is None:
        raise Fatal(Exit.NOT_FOUND, f"{database} has not been used by an agent yet")
    return read(owner, db)
