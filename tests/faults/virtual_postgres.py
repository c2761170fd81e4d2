"""Postgres in memory for the simulation: what the broker's SQL for accepting answers, and how it fails.

A statement is a transaction, and goes on although whoever asked for it has crashed; what it committed stays.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import asyncpg

from broker.authentication import Member
from broker.database import QUERIES
from faults.virtual_time import EPOCH, Life, Loop
from postroom._wire.administration import HistoryMessage


class Postgres:
    """What the broker asks of its database: the answers of its SQL for accepting, from memory."""

    def __init__(self, loop: Loop, member: Member, nowhere: str) -> None:
        """Know one member, and every topic but the one that is called `nowhere`."""
        self.accepted: dict[str, tuple[Any, ...]] = {}  # the dedupe rows, by client_message_id
        self.unpublished: deque[HistoryMessage] = deque()
        self._loop = loop
        self._member = member
        self._nowhere = nowhere
        self._life = Life(loop, "Postgres")
        self._last = 0
        self._transactions: dict[str, asyncio.Task[list[tuple[Any, ...]]]] = {}
        answers: dict[str, Callable[..., Awaitable[Any]]] = {
            "find_accepted": self._find,
            "accept": self._accept,
            "accepts_under_way": self._under_way,
            "find_members_by_token": self._members,
            "current_incarnation": self._incarnation,
            "last_history_id": self._last_number,
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
                self._last += 1
                seen = datetime.fromtimestamp(EPOCH + self._loop.time(), UTC)
                self.accepted[name] = (name, member, broker_id, self._last, fingerprint, seen, True)
                answers.append((position, self._last, None))
                self.unpublished.append(
                    HistoryMessage(
                        history_id=self._last,
                        broker_message_id=str(broker_id),
                        client_message_id=name,
                        mesh=self._member.mesh,
                        sender=self._member.name,
                        to=f"topic:{place}",
                        destination_kind="topic",
                        accepted_at=seen,
                        request_fingerprint=fingerprint.hex(),
                        priority=priority,
                        body=name,
                    )
                )
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
        return "00000000-0000-0000-0000-000000000001"

    async def _last_number(self, _mesh: int) -> int:
        return self._last

    async def _no(self, *_: Any) -> bool:
        return False
