"""A program of ours without one of its safeguards, for the controls: `python -m faults.without SAFEGUARD PROGRAM …`.

Each control has to fail: that shows that the goal would notice a product which lacked the safeguard.
"""

# ruff: noqa: PLC0415 - only the program that lacks a safeguard is imported

from __future__ import annotations

import runpy
import sqlite3
import sys
import time
from collections.abc import Callable
from typing import Any, Final

_SOMEBODY: Final = 60_000  # a uid
_LATE: Final = 0.01  # seconds after the answer


def commit_before_answer() -> None:
    """Answer what waits for a group, and commit it a moment later."""
    from postroom.chassis.sqlite import QUERIES
    from postroom.chassis.store import Outcome, Store, Submission

    commit = Store._commit

    def answer_first(self: Store, group: list[Submission], db: sqlite3.Connection) -> list[Outcome]:
        statement, QUERIES["commit"] = QUERIES["commit"], "SELECT 1"
        try:
            outcomes = commit(self, group, db)
        finally:
            QUERIES["commit"] = statement
        self._loop.call_soon_threadsafe(self._answer, group, outcomes)
        time.sleep(_LATE)
        db.execute(statement)
        return outcomes

    Store._commit = answer_first  # type: ignore[method-assign]


def synchronous_full() -> None:
    """Let SQLite sync when it checkpoints, not when it commits."""
    from postroom.chassis.sqlite import QUERIES

    pragmas = QUERIES["write_pragmas"]
    QUERIES["write_pragmas"] = pragmas.replace("synchronous = FULL", "synchronous = NORMAL")
    assert QUERIES["write_pragmas"] != pragmas


def record() -> None:
    """Never compare the streams with what was published."""
    from postroom.delivery.publication.record import Record

    async def see_nothing(self: Record, link: object) -> int:
        del self, link
        return 0

    Record.compare = see_nothing  # type: ignore[method-assign,assignment]


def fence() -> None:
    """Commit a step's effect although its lease is another's, and let no lost lease end a handler."""
    from postroom.ledger import legs
    from postroom.ledger.errors import Fault
    from postroom.ledger.legs import StepTransaction

    conclude = StepTransaction.conclude

    async def commit_all_the_same(self: StepTransaction, primitive: Any) -> Any:
        try:
            return await conclude(self, primitive)
        except Fault:
            if self._connection is not None:
                await self._connection.execute("COMMIT")
            raise

    async def only(_running: object, _entry: object, work: Any) -> Any:
        return await work

    StepTransaction.conclude = commit_all_the_same  # type: ignore[method-assign]
    legs.under_lease = only  # type: ignore[assignment]


def shares() -> None:
    """Take every caller for the same user."""
    from ipc import peers

    peer_of = peers.peer_of
    peers.peer_of = lambda sock: peer_of(sock)._replace(uid=_SOMEBODY)


def neighbouring_schemas() -> None:
    """Run on the program's own version of a schema alone."""
    from postroom.chassis import postgres, sqlite

    postgres.runs_on = sqlite.runs_on = int.__eq__  # type: ignore[assignment]


def question() -> None:
    """Retire a row although nobody knows whether the broker has accepted it, and do not ask."""
    from outbox import Outbox
    from outbox.operations import Act, Learned

    act = Act.run

    async def learn_nothing(self: Outbox, row_ids: object) -> Learned:
        del self, row_ids
        return Learned({})

    Outbox._learn = learn_nothing  # type: ignore[method-assign,assignment]
    Act.run = lambda self, transaction: act(self._replace(order=self.order._replace(force=True)), transaction)  # type: ignore[method-assign]


SAFEGUARDS: Final[dict[str, Callable[[], None]]] = {
    "the commit before the answer": commit_before_answer,
    "synchronous = FULL": synchronous_full,
    "the record": record,
    "the fence": fence,
    "the shares": shares,
    "the question before a requeue": question,
    "the schemas before and after its own": neighbouring_schemas,
}

if __name__ == "__main__":
    _, safeguard, program, *arguments = sys.argv
    SAFEGUARDS[safeguard]()
    sys.argv = [program, *arguments]
    runpy.run_module(program, run_name="__main__", alter_sys=True)
