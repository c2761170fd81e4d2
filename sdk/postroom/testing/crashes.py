"""A worker of flows that dies at a commit: right before it, or right after it, before it hears of it.

Its connections count the commits: the end of a transaction, and each primitive of the ledger that is one by itself.
Where it is to die, its connection breaks, as that of a killed process does, and it gets no other.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final, NamedTuple, TypeVar

import asyncpg

from postroom.ledger.primitives import QUERIES

_T = TypeVar("_T")

_PRIMITIVES: Final = {
    QUERIES[name]: name for name in ("enter_leg1", "complete_leg1", "enter_leg2", "spawn", "finish_job")
}
_COMMIT: Final = "COMMIT;"  # as asyncpg says it


class Crash(NamedTuple):
    """The worker dies at commit number `commit`, from 0, right before it or right after it."""

    commit: int
    after: bool


class Crashed(BaseException):
    """The worker is gone: nothing of it handles this."""


class MortalWorker:
    """A worker that may die at one of its commits; what is dead gets no further connection."""

    def __init__(self, crash: Crash | None = None) -> None:
        self.commits: list[str] = []  # the primitive that each one ended
        self.dead = False
        self._crash = crash

    def pool(self, url: str) -> Any:
        """Make its pool: a context manager that opens it."""
        return asyncpg.create_pool(
            url, min_size=1, max_size=2, connection_class=_Mortal, init=self._employ, setup=self._admit
        )

    def at_a_commit(self, primitive: str) -> Crash | None:
        """Count a commit; return how the worker dies there, None where it does not."""
        self.commits.append(primitive)
        crash = self._crash
        return crash if crash is not None and crash.commit == len(self.commits) - 1 else None

    async def _employ(self, connection: Any) -> None:
        connection.worker = self

    async def _admit(self, _connection: Any) -> None:
        if self.dead:
            raise Crashed


class _Mortal(asyncpg.Connection):  # it takes no argument when it runs
    worker: MortalWorker
    primitive = ""  # the last one

    async def execute(self, query: str, *args: Any, **more: Any) -> str:
        ending = super().execute(query, *args, **more)
        return await (self._commit(ending) if query == _COMMIT else ending)

    async def fetchrow(self, query: str, *args: Any, **more: Any) -> Any:
        calling = super().fetchrow(query, *args, **more)
        if query not in _PRIMITIVES:
            return await calling
        self.primitive = _PRIMITIVES[query]
        return await (calling if self.is_in_transaction() else self._commit(calling))

    async def _commit(self, committing: Coroutine[Any, Any, _T]) -> _T:
        crash = self.worker.at_a_commit(self.primitive)
        if crash is not None and not crash.after:
            committing.close()
            self._die()
        done = await committing
        if crash is not None:
            self._die()
        return done

    def _die(self) -> None:
        self.worker.dead = True
        self.terminate()
        raise Crashed
