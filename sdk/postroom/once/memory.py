"""Keys in the memory of one process: for tests, and for work that needs no record beyond the process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from postroom.once.model import LEASE_EXPIRED, Forgotten, KeptKey, KeyFilter, Result, Row, Scope, State


@dataclass(slots=True)
class _Key:
    state: State
    owner: str
    attempts: int
    begun: float  # seconds since the epoch
    ends: float  # the same: of the lease, or of the settlement
    last_error: str | None
    result: Result | None = None


class MemoryStore:
    """A `Store` that forgets everything with its process. `clock` gives seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._keys: dict[Scope, _Key] = {}
        self._forgotten: dict[Scope, list[Forgotten]] = {}

    async def take(self, scope: Scope, owner: str, lease: float) -> Row | None:
        """See `Store.take`."""
        key, now = self._keys.get(scope), self._clock()
        if key is None:
            self._keys[scope] = _Key("PENDING", owner, 1, now, now + lease, None)
        elif key.state == "FAILED" or (key.state == "PENDING" and key.ends <= now):
            error = LEASE_EXPIRED if key.state == "PENDING" else key.last_error
            self._keys[scope] = _Key("PENDING", owner, key.attempts + 1, now, now + lease, error)
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

    async def find(self, wanted: KeyFilter, limit: int) -> list[KeptKey]:
        """See `Store.find`."""
        found = [_kept(scope, key) for scope, key in self._keys.items() if _is_wanted(scope, key, wanted)]
        return sorted(found, key=lambda kept: self._end_of(kept.scope), reverse=True)[:limit]

    async def forget(self, scope: Scope, actor: str, reason: str) -> bool:
        """See `Store.forget`."""
        key = self._keys.get(scope)
        if key is None or (key.state == "PENDING" and key.ends > self._clock()):
            return False
        now = _moment(self._clock())
        self._forgotten.setdefault(scope, []).append(Forgotten(now, actor, reason, key.state, key.attempts))
        del self._keys[scope]
        return True

    async def forgotten(self, scope: Scope) -> list[Forgotten]:
        """See `Store.forgotten`."""
        return list(self._forgotten.get(scope, ()))

    async def close(self) -> None:
        """See `Store.close`."""
        self._keys.clear()

    def _held(self, scope: Scope, owner: str) -> _Key | None:
        key = self._keys.get(scope)
        live = key is not None and key.state == "PENDING" and key.owner == owner and key.ends > self._clock()
        return key if live else None

    def _end_of(self, scope: Scope) -> float:
        return self._keys[scope].ends


def _is_wanted(scope: Scope, key: _Key, wanted: KeyFilter) -> bool:
    holds = zip(wanted, (scope.tenant, scope.topic, scope.group or "", key.state), strict=True)
    return all(value in (None, found) for value, found in holds)


def _kept(scope: Scope, key: _Key) -> KeptKey:
    ends = _moment(key.ends)
    lease, settled = (ends, None) if key.state == "PENDING" else (None, ends)
    return KeptKey(scope, key.state, key.owner, key.attempts, _moment(key.begun), lease, settled, key.last_error)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)
