"""A history for a test: messages accepted by the broker's own transaction, without the broker around it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

import asyncpg
import msgspec

from broker.authentication import Member, digest
from broker.config import RetentionConfig
from broker.database import QUERIES, Database, migrate
from broker.items import Item, check
from broker.store import AcceptStore, Candidate, MessageIds
from postroom._wire.message import MAX_BODY_BYTES, prepare

T = TypeVar("T")

_PEOPLE = ("alice", "bob")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it on a loop that leaves the test plugin's alone."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


class History:
    """A broker's database with the mesh `demo`: alice and bob, topics `orders` and `news`, the queue `work`."""

    def __init__(self, url: str) -> None:
        self.url = url
        run(self._open())

    def accept(self, ids: Iterable[str], to: str = "topic:orders", mesh: str = "demo", **fields: Any) -> None:
        """Accept one message for each id, in one transaction."""
        run(self._accept(list(ids), to, mesh, fields))

    def execute(self, statement: str, *arguments: Any) -> None:
        """Run a statement."""
        run(self._on_connection(lambda connection: connection.execute(statement, *arguments)))

    def fetch(self, statement: str, *arguments: Any) -> list[Any]:
        """Return the rows of a query."""
        return run(self._on_connection(lambda connection: connection.fetch(statement, *arguments)))

    def tamper(self, *statements: str) -> None:
        """Change what triggers protect, as damage or time would."""
        run(self._on_connection(lambda connection: _tamper(connection, statements)))

    def add_mesh(self, mesh: str) -> None:
        """Add one more mesh with the same people, topics and queue."""
        run(self._on_connection(lambda connection: _add_mesh(connection, mesh)))

    async def _open(self) -> None:
        await migrate(self.url)
        await self._on_connection(lambda connection: _add_mesh(connection, "demo"))

    async def _accept(self, ids: list[str], to: str, mesh: str, fields: dict[str, Any]) -> None:
        database = await Database.open(self.url, connections=1)
        try:
            sender = await _sender(database, mesh)
            store = AcceptStore(database, RetentionConfig(), MessageIds())
            await store.write(sender, [_candidate(index, each, to, fields) for index, each in enumerate(ids)])
        finally:
            await database.close()

    async def _on_connection(self, work: Any) -> Any:
        connection = await asyncpg.connect(self.url)
        try:
            return await work(connection)
        finally:
            await connection.close()


def _candidate(position: int, client_message_id: str, to: str, fields: dict[str, Any]) -> Candidate:
    text = msgspec.json.encode({"to": to, "body": f"hello from {client_message_id}", **fields})
    prepared = prepare(text, idempotency_key=client_message_id)
    item = Item(position, client_message_id, prepared.fingerprint, msgspec.Raw(prepared.payload))
    return Candidate(item, check(item, MAX_BODY_BYTES))


async def _sender(database: Database, mesh: str) -> Member:
    row = await database.reading.fetchrow(QUERIES["find_members_by_token"], [digest(f"{mesh}/alice")])
    assert row is not None
    return Member(**row)


async def _add_mesh(connection: asyncpg.Connection[asyncpg.Record], mesh: str) -> None:
    await connection.execute(QUERIES["create_mesh"], mesh)
    mesh_id = await connection.fetchval(QUERIES["find_mesh"], mesh)
    members = [
        await connection.fetchval(QUERIES["create_member"], mesh_id, name, "member", digest(f"{mesh}/{name}"))
        for name in _PEOPLE
    ]
    await connection.execute(QUERIES["create_queue"], mesh_id, "work")
    for name in ("orders", "news"):
        await connection.execute(QUERIES["create_topic"], mesh_id, name)
        topic = await connection.fetchval(QUERIES["find_topic"], mesh_id, name)
        for member in members:
            await connection.execute(QUERIES["subscribe"], topic, member)


_GUARDED = ("mesh.client_message_dedupe", "mesh.message_history", "mesh.topic_message", "mesh.message_queue")


async def _tamper(connection: asyncpg.Connection[asyncpg.Record], statements: Iterable[str]) -> None:
    async with connection.transaction():
        for table in _GUARDED:
            await connection.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
        for statement in statements:
            await connection.execute(statement)
        for table in _GUARDED:
            await connection.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER")
