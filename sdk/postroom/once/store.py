"""What a registry needs of the place where its keys are kept: a few steps, each atomic and durable when it returns."""

from __future__ import annotations

from datetime import datetime
from typing import Protocol

from postroom.once.model import Forgotten, KeptKey, KeyFilter, Result, Row, Scope


class Store(Protocol):
    """One table of keys. Whether a lease has run out is decided by the store's own clock, within the step.

    A step that can't be taken raises `Unavailable`; it may have happened all the same. Taking `renew`, `commit` or
    `fail` again with the same owner is harmless.
    """

    async def take(self, scope: Scope, owner: str, lease: float) -> Row | None:
        """Make a free key `PENDING` for `owner`, for `lease` seconds; None where it is not free.

        A key is free where there is none, where it `FAILED`, and where its lease has run out. That attempt's last error
        is then `lease_expired`.
        """
        ...

    async def look(self, scope: Scope) -> Row | None:
        """Return the key as it is."""
        ...

    async def renew(self, scope: Scope, owner: str, lease: float) -> datetime | None:
        """Let the lease that `owner` still has run for `lease` seconds from now; None where it has none."""
        ...

    async def commit(self, scope: Scope, owner: str, result: Result) -> bool:
        """Make a key that `owner` still has a lease on `COMMITTED`; say whether it did."""
        ...

    async def fail(self, scope: Scope, owner: str, error: str) -> bool:
        """Make a key that `owner` still has a lease on `FAILED`; say whether it did."""
        ...

    async def purge(self, age: float, limit: int) -> int:
        """Delete up to `limit` keys that ended more than `age` seconds ago: settled, or left to their lease's end."""
        ...

    async def find(self, wanted: KeyFilter, limit: int) -> list[KeptKey]:
        """Return up to `limit` of the keys that are wanted: those that ended last, or whose lease ends last, first."""
        ...

    async def forget(self, scope: Scope, actor: str, reason: str) -> bool:
        """Delete a key that nobody has a lease on, and keep who wanted it and why; say whether it did."""
        ...

    async def forgotten(self, scope: Scope) -> list[Forgotten]:
        """Return when operators had this key forgotten, in order."""
        ...

    async def close(self) -> None:
        """Let go of the store. A second call does nothing."""
        ...
