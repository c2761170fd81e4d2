"""A mail room that many tests share, for what writes from other processes: the second daemon is a second host's."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from operator import not_
from pathlib import Path
from typing import Any

import asyncpg

from embedded import EmbeddedPostgres, EmbeddedRedis
from postroom import AsyncClient
from postroom.spark.rows import RowIds
from support.databases import create, drop
from support.mailroom import Mailroom, Process
from support.waiting import until_so

_DATABASE = "post"


@dataclasses.dataclass(frozen=True)
class Accepted:
    """A message as the broker has it."""

    body: bytes
    meta: dict[str, Any] | None
    priority: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class PostOffice:
    """A broker, the daemons of two hosts with one member, and what Postgres holds of one namespace."""

    namespace = ""

    def __init__(self, room: Mailroom, server: EmbeddedPostgres) -> None:
        self._room = room
        self._server = server
        self.database_url = server.url_of(_DATABASE)
        elsewhere = room.directory / "elsewhere"
        elsewhere.mkdir()
        self.socket = room.socket
        self.other_socket = elsewhere / "d.sock"
        settings = {
            "POSTROOM_DAEMON_SOCKET_PATH": self.other_socket,
            "POSTROOM_DAEMON_STATE_DIRECTORY": elsewhere / "state",
            "POSTROOM_DAEMON_MESH": "demo",
            "POSTROOM_DAEMON_BROKER_URL": room.broker_urls[0],
            "POSTROOM_DAEMON_BROKER_TOKEN_FILE": room.directory / "alice.token",
        }
        self._other_daemon = Process(elsewhere, "daemon", settings)

    @classmethod
    async def open(cls, directory: Path, postgres: EmbeddedPostgres, redis: EmbeddedRedis) -> PostOffice:
        """Start the broker and the first daemon on a database of its own, with a limiter that lets everything pass."""
        await create(postgres, _DATABASE)
        limits = {"POSTROOM_BROKER_LIMITER_PER_MESH": 10**9, "POSTROOM_BROKER_LIMITER_PER_MEMBER": 10**9}
        room = Mailroom(directory, postgres.url_of(_DATABASE), redis.url)
        for broker in room.brokers:
            broker.settle(limits)
        await room.open()
        return cls(room, postgres)

    def close(self) -> None:
        self._room.close()
        if self._other_daemon.running:
            self._other_daemon.stop()

    async def drop(self) -> None:
        await drop(self._server, _DATABASE)

    def open_other(self) -> None:
        """Start the second host's daemon, unless it runs."""
        if not self._other_daemon.running:
            self._other_daemon.start()

    def options(self, **others: str) -> dict[str, str]:
        """Options of a write to the topic in this test's namespace, by `order_id`."""
        given = {"to": "topic:orders", "id": "order_id", "socket": str(self.socket), "namespace": self.namespace}
        return given | others

    def id_of(self, *key: str) -> str:
        return RowIds(self.namespace).id_of(key)

    def accepted(self) -> dict[str, Accepted]:
        """Wait until both daemons have relayed what they have; return the namespace's messages by their key."""
        return asyncio.run(self._accepted())

    async def _accepted(self) -> dict[str, Accepted]:
        await _relayed(self.socket)
        if self._other_daemon.running:
            await _relayed(self.other_socket)
        prefix = self.id_of("x").removesuffix("x")
        database = await asyncpg.connect(self.database_url)
        rows = await database.fetch(
            "SELECT client_message_id, body, meta, priority FROM mesh.topic_message "
            "WHERE starts_with(client_message_id, $1)",
            prefix,
        )
        await database.close()
        found = {
            row["client_message_id"].removeprefix(prefix): Accepted(
                row["body"], json.loads(row["meta"] or "null"), row["priority"]
            )
            for row in rows
        }
        assert len(found) == len(rows), "an id was accepted twice"
        return found


async def _relayed(socket: Path) -> None:
    """Return when the daemon has nothing left to relay."""
    async with AsyncClient(socket) as client:
        await until_so(lambda: _unsettled(client), holds=not_)


async def _unsettled(client: AsyncClient) -> int:
    rows = (await client.health()).rows
    return rows.get("pending", 0) + rows.get("inflight", 0)
