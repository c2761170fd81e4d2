"""Which destinations the config lets callers use (spec send.md: "well formed and allowed by the config")."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from postroom.errors import NotPermitted


class DestinationRule:
    """Allows what matches one of its shell patterns, such as `topic:orders*`; without patterns everything."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = tuple(patterns)
        self._matches = lru_cache(maxsize=1024)(self._match)

    def check(self, destination: str) -> None:
        """Raise `NotPermitted` (403) for a destination that the config does not allow."""
        if self._patterns and not self._matches(destination):
            detail = f"this daemon may not send to {destination} (config: allow_destinations)"
            raise NotPermitted.of(403, "destination_not_allowed", detail, field="to")

    def _match(self, destination: str) -> bool:
        return any(fnmatchcase(destination, pattern) for pattern in self._patterns)
