"""A socket server in this process, over a real outbox, and a caller that speaks HTTP by hand, to break it."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from support.wire import Reply, encode, parse

from inbox import Inbox
from ipc.peers import DestinationRule, LocalToken, Policy, TcpGuard, peer_of
from ipc.routes import routes
from ipc.server import Server
from ipc.services import Counters, Services
from ipc.shares import Limits
from outbox import Outbox, OutboxSettings
from outbox.model import Caller
from postroom._wire.administration import Subscription, TopicList
from postroom._wire.sends import RelayStatus
from postroom.chassis.listener import tcp_listener, unix_listener
from postroom.errors import NotFound


class StillRelay:
    """A relay that stands still: tests move rows with the outbox's own operations."""

    def __init__(self) -> None:
        self.now = RelayStatus(state="relaying")
        self.changes = 0

    def status(self) -> RelayStatus:
        return self.now

    async def controls_changed(self) -> None:
        self.changes += 1


class OneTopic:
    """A broker's desk that knows one topic."""

    async def topics(self) -> TopicList:
        return TopicList(topics=[])

    async def subscribe(self, topic: str) -> Subscription:
        self._check(topic)
        return Subscription(mesh="demo", topic=topic, member="alice", created_at=datetime.now(UTC))

    async def unsubscribe(self, topic: str) -> None:
        self._check(topic)

    def _check(self, topic: str) -> None:
        if topic != "orders":
            raise NotFound.of("topic_not_found", f"there is no topic {topic!r}")


@dataclass
class Room:
    """A running server and what it runs on."""

    path: Path
    server: Server
    services: Services
    outbox: Outbox
    relay: StillRelay = field(default_factory=StillRelay)
    port: int | None = None

    async def connect(
        self, uid: int | None = None, limit: int = 2**24
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, as somebody else where the fixture `uids` believes it."""
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        if uid is not None:
            sock.bind(f"\0postroom-test {uid} {uuid4()}")
        await asyncio.get_running_loop().sock_connect(sock, str(self.path))
        return await asyncio.open_unix_connection(sock=sock, limit=limit)

    async def raw(self, request: bytes, *, half_close: bool = True, uid: int | None = None) -> bytes:
        """Send bytes, and return whatever comes back until the server closes."""
        reader, writer = await self.connect(uid)
        try:
            writer.write(request)
            await writer.drain()
            if half_close:
                writer.write_eof()
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    async def request(
        self,
        method: str,
        target: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        uid: int | None = None,
    ) -> Reply:
        """Make one request on a connection of its own."""
        return parse(await self.raw(encode(method, target, body, headers), uid=uid))

    async def send(self, body: Any, **headers: str) -> Reply:
        """Make one send; keyword `idempotency_key=…` becomes the header `Idempotency-Key`."""
        return await self.request(
            "POST", "/v1/send", body, {name.replace("_", "-"): value for name, value in headers.items()}
        )

    async def batch(self, *lines: Any) -> Reply:
        """Send the lines as one batch; bytes go as they are."""
        body = b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines)
        return await self.request("POST", "/v1/send/batch", body, {"Content-Type": "application/x-ndjson"})

    async def rows(self) -> int:
        """Count all rows of the outbox."""
        return sum((await self.outbox.counts()).rows.values())


OpenRoom = Callable[..., Awaitable[Room]]


@pytest.fixture
def uids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the server believe the uid that `Room.connect` writes into a caller's own address: only root can be many."""

    def believed(sock: socket.socket) -> Caller:
        caller = peer_of(sock)
        match = re.match(rb"\0postroom-test (\d+) ", sock.getpeername() or b"")
        return caller if match is None else Caller(int(match[1]), int(match[1]))

    monkeypatch.setattr("ipc.connection.peer_of", believed)
    monkeypatch.setattr("ipc.server.peer_of", believed)


@pytest.fixture
async def open_room(short_directory: Path) -> AsyncIterator[OpenRoom]:
    """Open servers with the limits, policy and settings that a test wants."""
    async with AsyncExitStack() as closing:

        async def open_one(
            *,
            limits: Limits | None = None,
            policy: Policy | None = None,
            destinations: tuple[str, ...] = (),
            settings: OutboxSettings | None = None,
            token_file: Path | None = None,
            name: str = "s",
            **more: Any,
        ) -> Room:
            outbox = await closing.enter_async_context(await Outbox.open(short_directory / name, settings))
            relay, counters = StillRelay(), Counters()

            async def expose() -> bytes:
                return b""

            services = Services(
                outbox=outbox,
                relay=relay,
                topics=OneTopic(),
                mesh="demo",
                version="0.0.0",
                expose=expose,
                limits=limits or Limits(),
                policy=policy or Policy(),
                counters=counters,
                destinations=DestinationRule(destinations),
                **more,
            )
            guard = None if token_file is None else TcpGuard(LocalToken(token_file))
            server = Server(
                routes(services),
                limits=services.limits,
                policy=services.policy,
                counters=counters,
                memory=services.budget,
                tcp_guard=guard,
            )
            path = short_directory / f"{name}.sock"
            sockets = [unix_listener(path)]
            if token_file is not None:
                sockets.append(tcp_listener(0))
            await server.start(sockets)
            closing.push_async_callback(server.stop, 5.0)
            port = sockets[1].getsockname()[1] if token_file is not None else None
            return Room(path, server, services, outbox, relay, port)

        yield open_one


@pytest.fixture
async def room(open_room: OpenRoom) -> Room:
    """Open a server as it is without a config."""
    return await open_room()


@pytest.fixture
async def inbox(short_directory: Path) -> AsyncIterator[Inbox]:
    async with await Inbox.open(short_directory / "inbox") as inbox:
        yield inbox
