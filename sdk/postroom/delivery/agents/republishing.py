"""Publishing again by hand: `postroom agent republish`, also while the agent runs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Final

from postroom.delivery.agents.clock import to_microseconds
from postroom.delivery.agents.inspecting import owner_of
from postroom.delivery.agents.runtime import open_turns
from postroom.delivery.agents.store import Store

_PER_MILLISECOND: Final = 1000  # µs


async def republish(database: Path, since: datetime, *, dry_run: bool = False) -> int:
    """Have everything published again that was published from `since` on; return how many messages that are.

    Whoever runs the agent does the publishing: at its next comparison with the streams, or when it starts. Raises
    `Fatal`: 3 where there is no store, 78 where it cannot be used.
    """
    owner = await owner_of(database)
    moment = to_microseconds(since) // _PER_MILLISECOND
    turns, underway = open_turns(database.parent)
    try:
        async with turns.turn():
            store = await Store.open(database, owner)
            try:
                return len(await store.published_since(moment)) if dry_run else await store.requeue_since(moment)
            finally:
                await store.close()
    finally:
        turns.close()
        underway.close()
