"""Who waits for a row to settle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class AllSettled(asyncio.Event):
    """Set when the last of some rows is done, dead or aborted."""

    def __init__(self, row_ids: Iterable[str]) -> None:
        super().__init__()
        self.unsettled = set(row_ids)


class Watchers:
    """Events by row id. Costs nothing while nobody waits."""

    def __init__(self) -> None:
        self._events: dict[str, set[AllSettled]] = {}

    @contextmanager
    def watch(self, *row_ids: str) -> Iterator[AllSettled]:
        """Register for as long as the block runs; look at the rows once more inside it, before waiting."""
        event = AllSettled(row_ids)
        for row_id in row_ids:
            self._events.setdefault(row_id, set()).add(event)
        try:
            yield event
        finally:
            for row_id in row_ids:
                events = self._events.get(row_id, set())
                events.discard(event)
                if not events:
                    self._events.pop(row_id, None)

    def settled(self, row_ids: Iterable[str]) -> None:
        """Wake whoever waits for these rows and for no others any more."""
        if self._events:
            for row_id in row_ids:
                for event in self._events.get(row_id, ()):
                    event.unsettled.discard(row_id)
                    if not event.unsettled:
                        event.set()
