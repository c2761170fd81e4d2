"""Shares: what callers hold at once (bytes, requests, waits, readers), so that none of them leaves nothing to others.

A limit of the config is what one uid may hold. All together may hold twice that, and nobody more than is still free:
whoever comes alone has the whole limit, and finds room however much another uid holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from postroom.errors import TryAgain

_BUSY_RETRY: Final = 1.0  # seconds
NOBODY: Final = -1  # whoever has no uid


class Budget:
    """Units that may be held at once; whoever takes some gives them back."""

    def __init__(self, size: int, full: str = "too many bytes are being received", code: str = "too_busy") -> None:
        """Let one uid hold `size` units; `full` is what the refusal says."""
        self._size = size
        self._full = full
        self._code = code
        self._held: defaultdict[int, int] = defaultdict(int)
        self.held = 0  # by all together

    @property
    def left(self) -> int:
        """How much one uid could take if all that is held were its own."""
        return self._size - self.held

    def ask(self, count: int, uid: int = NOBODY) -> None:
        """Raise `TryAgain` (429) where `uid` may not have `count` more; nothing is taken."""
        self.take(count, uid)
        self.give_back(count, uid)

    def take(self, count: int, uid: int = NOBODY) -> None:
        """Hold `count` more; raises `TryAgain` (429), and takes nothing, where `uid` may not have them."""
        held = self._held.get(uid, 0) + count
        if held > 2 * self._size - self.held - count:
            raise TryAgain.of(self._code, self._full, retryable=True, retry_after=_BUSY_RETRY)
        self._held[uid] = held
        self.held += count

    def give_back(self, count: int, uid: int = NOBODY) -> None:
        """Hold `count` less."""
        self.held -= count
        self._held[uid] -= count
        if not self._held[uid]:
            del self._held[uid]

    @contextmanager
    def holding(self, count: int, uid: int = NOBODY) -> Iterator[None]:
        """Hold `count` for the block; raises `TryAgain` (429) where `uid` may not have them."""
        self.take(count, uid)
        try:
            yield
        finally:
            self.give_back(count, uid)
