"""Brokers for tests: in this process or as processes of their own, on real Postgres and Redis, and callers of them."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import msgspec
import pytest
from aiohttp import web
from support.databases import migrated_database, postgres_of_its_own
from support.zygote import Forked, shared

from broker import server
from broker.app import Services, build
from broker.config import BrokerConfig
from broker.database import migrate
from broker.server import open_services
from embedded import EmbeddedPostgres
from postroom._wire.accept import AcceptAnswer, AcceptResponse
from postroom._wire.message import Envelope, check_envelope, prepare

TABLES = (
    "mesh.client_message_dedupe",
    "mesh.topic_message",
    "mesh.message_queue",
    "mesh.message_history",
    "mesh.delivery_queue",
    "mesh.mention_index",
    "postroom.outbox_events",
)
# The tables that hold anything, or did, but for the two that a migration fills: whoever counts rows counts their own.
USED_TABLES = """
SELECT string_agg(oid::regclass::text, ', ') FROM pg_class
WHERE relkind = 'r' AND relnamespace::regnamespace::text NOT IN ('pg_catalog', 'information_schema')
  AND oid NOT IN ('mesh.incarnation'::regclass, 'postroom.schema_migration'::regclass) AND pg_relation_size(oid) > 0
"""
ADMIN_TOKEN = "an administrator's token for tests"


@dataclass(frozen=True)
class Answer:
    """What came back: status, decoded body, headers."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def code(self) -> str | None:
        return self.body.get("code") if isinstance(self.body, dict) else None


@dataclass(frozen=True)
class Caller:
    """Somebody who calls brokers with one token."""

    session: aiohttp.ClientSession
    url: str
    token: str | None

    async def call(self, method: str, path: str, body: Any = None, /, **query: Any) -> Answer:
        text = body if body is None or isinstance(body, bytes) else msgspec.json.encode(body)
        data = None if text is None else io.BytesIO(text)  # aiohttp warns of bytes that take long to send
        headers = {"Content-Type": "application/json"} if data is not None else {}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        url = self.url + path
        async with self.session.request(method, url, data=data, headers=headers, params=query) as response:
            text = await response.text()
            is_json = "json" in response.content_type
            return Answer(response.status, json.loads(text) if is_json else text, response.headers)

    async def get(self, path: str, /, **query: Any) -> Answer:
        return await self.call("GET", path, **query)

    async def post(self, path: str, body: Any = None) -> Answer:
        return await self.call("POST", path, body)

    async def delete(self, path: str) -> Answer:
        return await self.call("DELETE", path)

    async def send(self, *items: dict[str, Any]) -> list[AcceptAnswer]:
        """Post a batch; the request as a whole must succeed."""
        answer = await self.post("/v1/accept", {"messages": items})
        assert answer.status == 200, answer.body
        return msgspec.convert(answer.body, AcceptResponse).answers

    async def send_one(self, item: dict[str, Any]) -> AcceptAnswer:
        (answer,) = await self.send(item)
        return answer

    def at(self, url: str) -> Caller:
        """Return the same caller at another instance."""
        return Caller(self.session, url, self.token)


@dataclass
class Broker:
    """A running instance and its callers."""

    url: str
    services: Services
    session: aiohttp.ClientSession
    tokens: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def admin(self) -> Caller:
        return Caller(self.session, self.url, ADMIN_TOKEN)

    @property
    def nobody(self) -> Caller:
        return Caller(self.session, self.url, None)

    def member(self, name: str, mesh: str = "demo") -> Caller:
        return Caller(self.session, self.url, self.tokens[mesh, name])

    async def add_mesh(self, mesh: str = "demo", members: Mapping[str, str] = {"alice": "member"}) -> None:
        """Create a mesh with members (name → role), the topic `orders` with all of them, and the queue `work`."""
        await self._done(self.admin.post("/v1/meshes", {"slug": mesh}))
        await self._done(self.admin.post("/v1/topics", {"mesh": mesh, "name": "orders"}))
        await self._done(self.admin.post("/v1/queues", {"mesh": mesh, "name": "work"}))
        for name, role in members.items():
            created = await self.admin.post("/v1/members", {"mesh": mesh, "name": name, "role": role})
            assert created.status == 201, created.body
            self.tokens[mesh, name] = created.body["token"]
            await self._done(self.admin.post(f"/v1/topics/{mesh}/orders/subscriptions", {"member": name}))

    async def _done(self, answer: Any) -> None:
        assert (await answer).status == 201

    def metric(self, name: str, **labels: str) -> float:
        return self.services.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def admin_token_file(tmp_path: Path) -> Path:
    file = tmp_path / "admin-token"
    file.write_text(ADMIN_TOKEN + "\n")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="session")
def broker_database(postgres_server: EmbeddedPostgres) -> str:
    """One migrated database for all these tests."""
    return migrated_database(postgres_server, "broker", migrate)


@pytest.fixture
def config(broker_database: str, redis_url: str, admin_token_file: Path) -> BrokerConfig:
    return BrokerConfig(
        database_url=broker_database, redis_url=redis_url, admin_token_file=admin_token_file, listen_port=0
    )


@pytest.fixture
async def postgres(broker_database: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await asyncpg.connect(broker_database)
    yield connection
    await connection.close()


@pytest.fixture
async def migrated(config: BrokerConfig, postgres: asyncpg.Connection[asyncpg.Record]) -> BrokerConfig:
    """The config of a broker on an empty, migrated database."""
    if used := await postgres.fetchval(USED_TABLES):
        await postgres.execute(f"TRUNCATE {used} RESTART IDENTITY CASCADE")
    return config


@asynccontextmanager
async def serving(config: BrokerConfig) -> AsyncIterator[Broker]:
    """Run an instance in this process."""
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(open_services(config))
        runner = web.AppRunner(build(services), access_log=None, auto_decompress=False)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        session = await stack.enter_async_context(aiohttp.ClientSession())
        yield Broker(f"http://{host}:{port}", services, session)


StartBroker = Callable[[BrokerConfig], contextlib.AbstractAsyncContextManager[Broker]]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nobody wait for a share of the broker for longer than a moment."""
    monkeypatch.setattr("broker.shares.WAIT_SECONDS", 0.05)


@pytest.fixture
def start_broker(migrated: BrokerConfig) -> StartBroker:  # noqa: ARG001 - the schema must be there
    """How to run an instance on the migrated database; several may run at once."""
    return serving


@pytest.fixture
async def broker(migrated: BrokerConfig) -> AsyncIterator[Broker]:
    """An instance with the mesh `demo`: alice and bob, and the admin ada."""
    async with serving(migrated) as running:
        await running.add_mesh("demo", {"alice": "member", "bob": "member", "ada": "admin"})
        yield running


@pytest.fixture
async def exposed(migrated: BrokerConfig) -> AsyncIterator[Broker]:
    """The same, whose connections are those of the process: they have deadlines, and may be half closed."""
    async with (
        open_services(migrated) as services,
        server.serving(services) as url,
        aiohttp.ClientSession() as session,
    ):
        running = Broker(url, services, session)
        await running.add_mesh("demo", {"alice": "member"})
        yield running


@pytest.fixture
def tamper(postgres: asyncpg.Connection[asyncpg.Record]) -> Callable[[str], Awaitable[None]]:
    """How to change what the triggers protect, as damage or time would."""

    async def execute(statement: str) -> None:
        guarded = ["mesh.client_message_dedupe", "mesh.message_history"]
        async with postgres.transaction():
            for table in guarded:
                await postgres.execute(f"ALTER TABLE {table} DISABLE TRIGGER USER")
            await postgres.execute(statement)
            for table in guarded:
                await postgres.execute(f"ALTER TABLE {table} ENABLE TRIGGER USER")

    return execute


@pytest.fixture
def message() -> Callable[..., dict[str, Any]]:
    """How to build an item of a batch, as the daemon does: checked, fingerprinted, encoded."""

    def build_item(client_message_id: str, to: str = "topic:orders", **fields: Any) -> dict[str, Any]:
        prepared = prepare(
            msgspec.json.encode({"to": to, "body": "hello", **fields}), idempotency_key=client_message_id
        )
        return {
            "client_message_id": client_message_id,
            "request_fingerprint": prepared.fingerprint.hex(),
            "message": msgspec.json.decode(prepared.payload),
        }

    return build_item


@pytest.fixture
def refingerprinted() -> Callable[..., dict[str, Any]]:
    """How to build an item that no daemon would send: nothing is checked, and the fingerprint is right all the same."""

    def build_item(client_message_id: str, to: str = "topic:orders", **fields: Any) -> dict[str, Any]:
        envelope = Envelope(to=to, **{"body": "hello", **fields})
        return {
            "client_message_id": client_message_id,
            "request_fingerprint": check_envelope(envelope).fingerprint.hex(),
            "message": envelope,
        }

    return build_item


@pytest.fixture
def counts(postgres: asyncpg.Connection[asyncpg.Record]) -> Callable[[], Any]:
    """How to count the rows of every table that an accept writes."""

    async def count() -> dict[str, int]:
        return {
            table.split(".")[1]: await postgres.fetchval(f"SELECT count(*) FROM {table}")  # noqa: S608 - our own names
            for table in TABLES
        }

    return count


@pytest.fixture
def waiting_for_lock(postgres: asyncpg.Connection[asyncpg.Record]) -> Callable[[int], Awaitable[None]]:
    """How to wait until this many statements of the broker wait for a lock; the server says so, nobody guesses."""

    async def wait(statements: int) -> None:
        query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        while await postgres.fetchval(query) < statements:
            await asyncio.sleep(0)
            await postgres.execute("SELECT pg_stat_clear_snapshot()")

    return wait


@dataclass
class BrokerProcess:
    """A broker as a process of its own, at `url`."""

    process: Forked
    url: str

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        self.process.terminate()
        return self.process.wait(30)


@pytest.fixture
def config_file(migrated: BrokerConfig, tmp_path: Path) -> Path:
    """The same config as a file."""
    file = tmp_path / "broker.toml"
    file.write_text(
        f'database_url = "{migrated.database_url}"\nredis_url = "{migrated.redis_url}"\n'
        f'admin_token_file = "{migrated.admin_token_file}"\nlisten_port = 0\n'
    )
    return file


@pytest.fixture
async def broker_process(config_file: Path) -> AsyncIterator[BrokerProcess]:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as output:
        process = shared().start(["-m", "broker", "--config", str(config_file)], os.environ, output)
    with os.fdopen(reading, "rb") as said:
        started = json.loads(await asyncio.to_thread(said.readline))
        log = asyncio.create_task(asyncio.to_thread(said.read))  # or it would wait for somebody to read it
        yield BrokerProcess(process, started["url"])
        process.kill()
        process.wait()
        await log


@pytest.fixture
async def own_postgres(short_directory: Path) -> AsyncIterator[EmbeddedPostgres]:
    """A Postgres that a test may stop, with the migrated database `own`."""
    async with postgres_of_its_own(short_directory, migrate) as server:
        yield server
