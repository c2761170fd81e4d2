"""Postgres in memory for the simulation: what the broker asks for accepting and for the history, and how it fails.

A statement is a transaction, and goes on although whoever asked for it has crashed; what it committed stays.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, cast

import asyncpg

from broker.authentication import Member
from broker.database import QUERIES
from faults.virtual_time import EPOCH, Life, Loop
from postroom._wire.administration import HistoryMessage
from postroom.delivery.message import history_message

_INCARNATION: Final = "00000000-0000-0000-0000-000000000001"


class Cursor:
    """A cursor of asyncpg's."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = iter(rows)

    async def fetch(self, count: int) -> list[Any]:
        """Return the next rows."""
        return list(islice(self._rows, count))


class Postgres:
    """What the broker asks of its database: the answers of its SQL, from memory."""

    def __init__(self, loop: Loop, member: Member, nowhere: str) -> None:
        """Know one member, and every topic but the one that is called `nowhere`."""
        self.accepted: dict[str, tuple[Any, ...]] = {}  # the dedupe rows, by client_message_id
        self.unpublished: deque[HistoryMessage] = deque()
        self._loop = loop
        self._member = member
        self._nowhere = nowhere
        self._life = Life(loop, "Postgres")
        self._history: list[dict[str, Any]] = []  # the rows of `mesh.message`, in the order of their numbers, from 1
        self._transactions: dict[str, asyncio.Task[list[tuple[Any, ...]]]] = {}
        answers: dict[str, Callable[..., Awaitable[Any]]] = {
            "find_accepted": self._find,
            "accept": self._accept,
            "accepts_under_way": self._under_way,
            "find_members_by_token": self._members,
            "current_incarnation": self._incarnation,
            "last_history_id": self._last_number,
            "find_cursor": self._find_cursor,
            "history_horizon": self._horizon,
            "read_history": self._read_history,
            "is_read_only": self._no,
            "ring": self._no,
        }
        self._answers = {QUERIES[name]: answer for name, answer in answers.items()}

    @asynccontextmanager
    async def acquire(self, *, timeout: float | None = None) -> AsyncIterator[Postgres]:  # noqa: ASYNC109 - asyncpg's own
        """Lend a connection, as a pool of asyncpg does."""
        del timeout
        yield self

    async def close(self) -> None:
        """Do as a pool does."""

    @asynccontextmanager
    async def transaction(self, *, readonly: bool) -> AsyncIterator[None]:
        """Do as a connection does; what the broker reads in one is a single statement."""
        assert readonly
        yield

    async def cursor(self, query: str, *values: Any) -> Cursor:
        """Answer a query row by row."""
        return Cursor(await self.fetch(query, *values))

    async def fetch(self, query: str, *values: Any) -> Any:
        """Answer a query of the broker's, or fail as Postgres does."""
        await self._loop.pause(0.003)
        if self._loop.network.happens(0.02, "Postgres refused"):
            raise self._loop.chance.choice(
                (asyncpg.DeadlockDetectedError("deadlock"), asyncpg.CannotConnectNowError("starting"), TimeoutError())
            )
        answer = await self._answers[query](*values)
        await self._loop.pause(0.003)
        return answer

    fetchval = execute = fetch

    async def _find(self, _mesh: int, names: list[str]) -> list[tuple[Any, ...]]:
        return [self.accepted[name] for name in names if name in self.accepted]

    async def _accept(self, *values: Any) -> list[tuple[Any, ...]]:
        """Run the statement to its end, whoever still waits for it, since Postgres does."""
        task = self._life.start(self._transact(values))
        self._transactions[f"3/{len(self._transactions)}"] = task
        answers = await asyncio.shield(task)
        if self._loop.network.happens(0.03, "Postgres gone after the commit"):
            raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")
        return answers

    async def _transact(self, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        await self._loop.pause(30 if self._loop.network.happens(0.02, "Postgres stalled") else 0.01)
        answers: list[tuple[Any, ...]] = []
        _, member, _, _, _, ids, names, prints, _, places, priorities, *_ = values
        batch = zip(ids, names, prints, places, priorities, strict=True)
        for position, (broker_id, name, fingerprint, place, priority) in enumerate(batch):
            if place == self._nowhere:
                answers.append((position, None, "destination_not_found"))
            elif name in self.accepted:
                answers.append((position, None, None))
            else:
                number, seen = len(self._history) + 1, datetime.fromtimestamp(EPOCH + self._loop.time(), UTC)
                self.accepted[name] = (name, member, broker_id, number, fingerprint, seen, True)
                answers.append((position, number, None))
                row = {
                    "history_id": number,
                    "broker_message_id": broker_id,
                    "client_message_id": name,
                    "mesh": self._member.mesh,
                    "sender": self._member.name,
                    "destination_kind": "topic",
                    "destination_ref": place,
                    "accepted_at": seen,
                    "request_fingerprint": fingerprint,
                    "priority": priority,
                    "body": name.encode(),
                    "body_is_text": True,
                    **dict.fromkeys(("meta", "reply_to", "traceparent")),
                }
                self._history.append(row)
                self.unpublished.append(history_message(cast(asyncpg.Record, row)))
                self._loop.network.note(f"accepted {name}")
        return answers

    async def _under_way(self, asked: list[str] | None) -> list[str] | None:
        return [
            name for name, task in self._transactions.items() if not task.done() and (asked is None or name in asked)
        ] or None

    async def _members(self, tokens: list[bytes]) -> list[dict[str, Any]]:
        found = self._member
        row = {"mesh_id": found.mesh_id, "mesh": found.mesh, "member_id": found.member_id, "name": found.name}
        own = found.token_sha256
        return [row | {"role": found.role, "token_sha256": own} for token in tokens if token == own]

    async def _incarnation(self) -> str:
        return _INCARNATION

    async def _last_number(self, _mesh: int) -> int:
        return len(self._history)

    async def _find_cursor(self, _mesh: str, _after: int) -> list[tuple[Any, ...]]:
        return [(_INCARNATION, self._member.mesh_id, None)]

    async def _horizon(self, _mesh: int) -> list[tuple[Any, ...]]:
        return [(len(self._history), None)]

    async def _read_history(self, *values: Any) -> list[dict[str, Any]]:
        _, after, most, limit, *_, last, _oldest = values
        found = self._history[after : min(last, after + most)]
        extent = {
            "looked_to": found[-1]["history_id"] if found else None,
            "matched": min(len(found), limit),
            "more": after + len(found) < len(self._history),
            "deleted_to": None,
        }
        return [extent | row for row in found[:limit] or [{"history_id": None}]]

    async def _no(self, *_: Any) -> bool:
        return False
