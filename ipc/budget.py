"""The memory that requests may hold until they are on disk, all callers together (`limits.buffered_bytes`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from postroom.errors import TryAgain

_BUSY_RETRY: Final = 1.0  # seconds


class Budget:
    """Bytes that may be held at once; whoever takes some gives them back."""

    def __init__(self, size: int) -> None:
        self.left = size

    def ask(self, count: int) -> None:
        """Raise `TryAgain` (429) where `count` bytes are not left; nothing is taken."""
        if count > self.left:
            raise TryAgain.of(429, "too_busy", "too much is being received", retryable=True, retry_after=_BUSY_RETRY)

    def take(self, count: int) -> None:
        """Hold `count` bytes more; raises `TryAgain` (429), and takes nothing, where they are not left."""
        self.ask(count)
        self.left -= count

    def give_back(self, count: int) -> None:
        """Hold `count` bytes less."""
        self.left += count

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        """Hold `count` bytes for the block; raises `TryAgain` (429) where they are not left."""
        self.take(count)
        try:
            yield
        finally:
            self.give_back(count)
