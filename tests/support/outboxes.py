"""What the outbox's tests share: a clock that only the test moves, callers, sends, and a look into the file."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from outbox import AcceptedRow, Caller, Outbox, Settlement, Verdict
from postroom._wire.message import PreparedSend

START: Final = 1_800_000_000_000  # ms since the epoch
ALICE: Final = Caller(1000, 1000, "alice")
OPERATOR: Final = Caller(0, 0, "root")


class Clock:
    """A clock that only the test moves; ms since the epoch."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> int:
        return self.now

    def forward(self, seconds: float) -> None:
        self.now += int(seconds * 1000)


class Why(NamedTuple):
    """Who wants a verb done and why, as keyword arguments: `**WHY`."""

    caller: Caller = OPERATOR
    reason: str = "the receiver was repaired"


WHY: Final[dict[str, Any]] = Why()._asdict()


def send(
    client_message_id: str = "id-1",
    body: str = "hello",
    *,
    to: str = "topic:orders",
    priority: Any = "next",
    not_before: int | None = None,
) -> PreparedSend:
    """A prepared send; its fingerprint stands for its content as the real one does. `not_before` in ms."""
    content = msgspec.json.encode({"to": to, "body": body, "priority": priority})
    due = None if not_before is None else datetime.fromtimestamp(not_before / 1000, UTC)
    return PreparedSend(client_message_id, hashlib.sha256(content).digest(), content, to, priority, due)


async def accepted(outbox: Outbox, *sends: PreparedSend, caller: Caller = ALICE) -> list[AcceptedRow]:
    """Accept sends that nothing stands against."""
    outcomes = await outbox.accept(sends, caller)
    for outcome in outcomes:
        if not isinstance(outcome, AcceptedRow):
            raise outcome
    return outcomes  # type: ignore[return-value]


async def row_in(outbox: Outbox, status: str, client_message_id: str = "id-1") -> str:
    """Write a row, bring it to `status`, and return its id."""
    (row,) = await accepted(outbox, send(client_message_id))
    if status == "aborted":
        await outbox.act("abort", row.row_id, **WHY)
    elif status != "pending":
        claimed = await outbox.claim()
        assert [each.row_id for each in claimed] == [row.row_id]
    if status == "done":
        await outbox.settle([done(row.row_id)])
    if status == "dead":
        await outbox.settle([dead(row.row_id)])
    return row.row_id


def done(row_id: str) -> Settlement:
    return Settlement(row_id, Verdict.DONE, broker_message_id="BROKER-1", history_id=7)


def dead(row_id: str, last_error: str = "topic_not_found: there is no topic orders") -> Settlement:
    return Settlement(row_id, Verdict.DEAD, last_error=last_error, answered=True)


def retry(row_id: str, wait_ms: int = 0, *, burns_attempt: bool = True) -> Settlement:
    return Settlement(
        row_id,
        Verdict.RETRY,
        wait_ms=wait_ms,
        last_error="unavailable: the broker is away",
        burns_attempt=burns_attempt,
    )


_DIES = """
import os, signal, sys
from pathlib import Path

rename, left = Path.rename, int(sys.argv[1])

def rename_or_die(self, target):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return rename(self, target)

Path.rename = rename_or_die
paths = [Path(each) for each in sys.argv[2:]]
"""


async def killed_at_a_rename(before: int, code: str, *paths: Path) -> None:
    """Run `code`, which finds `paths`, in a process that is killed where it renames a file, after so many `before`."""
    dies = await asyncio.create_subprocess_exec(sys.executable, "-c", _DIES + code, str(before), *map(str, paths))
    assert await dies.wait() == -signal.SIGKILL


@contextmanager
def opened(database: Path) -> Iterator[sqlite3.Connection]:
    """The file itself, for looking at what is in it."""
    with closing(sqlite3.connect(database, isolation_level=None)) as db:
        yield db


def counted(database: Path) -> dict[str, int]:
    """Count the rows by status, the slow way."""
    with opened(database) as db:
        found = dict(db.execute("SELECT status, count(*) FROM outbox_whole GROUP BY status"))
    return {status: found.get(status, 0) for status in ("pending", "inflight", "done", "dead", "aborted")}
