"""How long a publisher rests between two looks at its backlog: short under traffic, longer the longer nothing comes."""

from __future__ import annotations

from typing import Final

_LEAST_SECONDS: Final = 0.005  # after a batch: what comes meanwhile shares the next
_SHARE: Final = 0.25  # of the time since something came: a rest adds no more to what it keeps waiting


class Pace:
    """The rests of one publisher, at most `most` seconds each."""

    def __init__(self, most: float) -> None:
        self._most = most
        self._busy_at = float("-inf")

    def rest(self, now: float, *, moved: bool) -> float:
        """Return the seconds until the next look; `moved` says whether this one, at `now`, found anything."""
        if moved:
            self._busy_at = now
        return min(max(_LEAST_SECONDS, _SHARE * (now - self._busy_at)), self._most)
