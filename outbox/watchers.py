"""Who waits for a row to settle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Watchers:
    """Events by row id: set when the row is done, dead or aborted. Costs nothing while nobody waits."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}

    @contextmanager
    def watch(self, row_id: str) -> Iterator[asyncio.Event]:
        """Register for as long as the block runs; look at the row once more inside it, before waiting."""
        event = asyncio.Event()
        events = self._events.setdefault(row_id, set())
        events.add(event)
        try:
            yield event
        finally:
            events.discard(event)
            if not events:
                self._events.pop(row_id, None)

    def settled(self, row_ids: Iterable[str]) -> None:
        """Wake whoever waits for these rows."""
        if self._events:
            for row_id in row_ids:
                for event in self._events.get(row_id, ()):
                    event.set()
