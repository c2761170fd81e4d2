"""Keys in the memory of one process: for tests, and for work that needs no record beyond the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from postroom.once.model import LEASE_EXPIRED, Result, Row, Scope, State


@dataclass(slots=True)
class _Key:
    state: State
    owner: str
    attempts: int
    ends: float  # seconds since the epoch: of the lease, or of the settlement
    last_error: str | None
    result: Result | None = None


class MemoryStore:
    """A `Store` that forgets everything with its process. `clock` gives seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._keys: dict[Scope, _Key] = {}

    async def take(self, scope: Scope, owner: str, lease: float) -> Row | None:
        """See `Store.take`."""
        key, now = self._keys.get(scope), self._clock()
        if key is None:
            self._keys[scope] = _Key("PENDING", owner, 1, now + lease, None)
        elif key.state == "FAILED" or (key.state == "PENDING" and key.ends <= now):
            error = LEASE_EXPIRED if key.state == "PENDING" else key.last_error
            self._keys[scope] = _Key("PENDING", owner, key.attempts + 1, now + lease, error)
        else:
            return None
        return await self.look(scope)

    async def look(self, scope: Scope) -> Row | None:
        """See `Store.look`."""
        key = self._keys.get(scope)
        if key is None:
            return None
        until = _moment(key.ends) if key.state == "PENDING" else None
        return Row(key.state, key.owner, key.attempts, until, key.last_error, key.result, _moment(self._clock()))

    async def renew(self, scope: Scope, owner: str, lease: float) -> datetime | None:
        """See `Store.renew`."""
        key = self._held(scope, owner)
        if key is None:
            return None
        key.ends = self._clock() + lease
        return _moment(key.ends)

    async def commit(self, scope: Scope, owner: str, result: Result) -> bool:
        """See `Store.commit`."""
        key = self._held(scope, owner)
        if key is not None:
            key.state, key.ends, key.result = "COMMITTED", self._clock(), result
        return key is not None

    async def fail(self, scope: Scope, owner: str, error: str) -> bool:
        """See `Store.fail`."""
        key = self._held(scope, owner)
        if key is not None:
            key.state, key.ends, key.last_error = "FAILED", self._clock(), error
        return key is not None

    async def purge(self, age: float, limit: int) -> int:
        """See `Store.purge`."""
        before = self._clock() - age
        old = sorted((scope for scope, key in self._keys.items() if key.ends < before), key=self._end_of)[:limit]
        for scope in old:
            del self._keys[scope]
        return len(old)

    async def close(self) -> None:
        """See `Store.close`."""
        self._keys.clear()

    def _held(self, scope: Scope, owner: str) -> _Key | None:
        key = self._keys.get(scope)
        live = key is not None and key.state == "PENDING" and key.owner == owner and key.ends > self._clock()
        return key if live else None

    def _end_of(self, scope: Scope) -> float:
        return self._keys[scope].ends


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
