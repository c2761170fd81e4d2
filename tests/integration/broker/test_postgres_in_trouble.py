"""A Postgres that answers, but not with what was asked: full, renamed, a standby, or with a lock in the way."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any

import asyncpg
import msgspec
import pytest
from structlog.testing import capture_logs
from support.certificates import CERTIFICATE, KEY
from support.databases import END_SESSIONS
from support.waiting import until_so

from broker.database import Database, migrate
from broker.operator import each
from embedded import EmbeddedPostgres
from postroom.chassis.postgres import _SERVER_SETTINGS, close_pool, open_pool
from postroom.errors import Conflict

Message = Callable[..., dict[str, Any]]
Trouble = Callable[[str], Any]

REFUSING = "ALTER DATABASE {name} CONNECTION LIMIT 0"
RENAMED = "ALTER DATABASE {name} RENAME TO {name}_away"
READ_ONLY = "ALTER DATABASE {name} SET default_transaction_read_only = on"
WRITABLE = "ALTER DATABASE {name} RESET default_transaction_read_only"
AS_ON_A_STANDBY = """
CREATE OR REPLACE FUNCTION mesh.current_incarnation() RETURNS uuid LANGUAGE plpgsql AS $$ BEGIN
  RAISE EXCEPTION 'the database is a standby' USING ERRCODE = 'cannot_connect_now';
END $$
"""


@pytest.fixture
async def elsewhere(postgres_server: EmbeddedPostgres) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A connection to another database, from which one's own can be altered."""
    connection = await asyncpg.connect(postgres_server.url)
    yield connection
    await connection.close()


@pytest.fixture
async def broker(migrated: Any, start_broker: Any, database_url: str) -> AsyncIterator[Any]:
    """A broker on a database of this test's own."""
    await migrate(database_url)
    async with start_broker(msgspec.structs.replace(migrated, database_url=database_url)) as running:
        await running.add_mesh()
        yield running


@pytest.fixture
async def trouble(elsewhere: Any, database_url: str) -> AsyncIterator[Trouble]:
    """How to bring trouble over the database; it is over when the test is."""
    name = database_url.partition("@/")[2].partition("?")[0]

    async def is_altered(statement: str) -> bool:
        await elsewhere.execute(END_SESSIONS.format(name=name))
        try:
            await elsewhere.execute(statement.format(name=name))
        except asyncpg.ObjectInUseError:  # a pool of the broker was quicker
            return False
        return True

    async def bring(statement: str) -> None:
        await until_so(lambda: is_altered(statement))
        await elsewhere.execute(END_SESSIONS.format(name=name))

    yield bring
    if await elsewhere.fetchval("SELECT count(*) FROM pg_database WHERE datname = $1", f"{name}_away"):
        await elsewhere.execute(f"ALTER DATABASE {name}_away RENAME TO {name}")


@pytest.mark.parametrize(
    ("statement", "why"), [(REFUSING, "takes no more connections"), (RENAMED, "refuses the login")]
)
async def test_a_postgres_that_lets_nobody_in_is_a_503_and_said(
    broker: Any, trouble: Trouble, message: Message, statement: str, why: str
) -> None:
    reachable = "postroom_broker_postgres_reachable"
    assert f"{reachable} 1.0" in (await broker.nobody.get("/metrics")).body
    await trouble(statement)

    assert f"{reachable} 0.0" in (await broker.nobody.get("/metrics")).body
    health, ready = await broker.nobody.get("/health"), await broker.nobody.get("/ready")
    assert (health.status, ready.status) == (200, 503)
    assert ready.body["reasons"] == [f"Postgres {why}: the broker cannot accept messages"]
    for answer in (
        await broker.member("alice").post("/v1/accept", {"messages": [message("id-1")]}),
        await broker.admin.get("/v1/meshes"),
    ):
        assert (answer.status, answer.code, answer.body["retryable"]) == (503, "database_unavailable", True)


async def test_a_postgres_that_takes_no_writes_is_not_ready_and_keeps_nothing(
    broker: Any, trouble: Trouble, message: Message
) -> None:
    alice = broker.member("alice")
    assert (await alice.send_one(message("id-1"))).status == 201
    await trouble(READ_ONLY)

    while "does not answer" in str(
        (ready := await broker.nobody.get("/ready")).body
    ):  # over a connection that has ended
        pass
    assert (ready.status, ready.body["status"]) == (503, "unavailable")
    assert "is read-only" in ready.body["reasons"][0]
    assert [answer.status for answer in await alice.send(message("id-1"), message("id-2"))] == [200, 503]
    refused = await broker.admin.post("/v1/topics", {"mesh": "demo", "name": "news"})
    assert (refused.status, refused.code) == (503, "database_unavailable")
    assert (await broker.admin.get("/v1/topics", mesh="demo")).status == 200


async def test_a_postgres_that_says_why_it_cannot_be_used_is_quoted(
    broker: Any, trouble: Trouble, database_url: str
) -> None:
    owner = await asyncpg.connect(database_url)
    await owner.execute(AS_ON_A_STANDBY)
    await owner.close()
    await trouble("SELECT")

    async def standby() -> bool:
        return "(the database is a standby)" in str((await broker.nobody.get("/ready")).body)

    await until_so(standby, "the reason is the server's")


async def test_a_postgres_that_takes_writes_again_does_over_new_connections(
    broker: Any, trouble: Trouble, elsewhere: Any, database_url: str, message: Message
) -> None:
    async def lists_topics() -> bool:
        return (await broker.admin.get("/v1/topics", mesh="demo")).status == 200

    async def creates_a_topic() -> bool:
        return (await broker.admin.post("/v1/topics", {"mesh": "demo", "name": "news"})).status == 201

    async def accepts() -> bool:
        return (await broker.member("alice").send_one(message("id-1"))).status == 201

    await trouble(READ_ONLY)
    await until_so(lists_topics)  # over a connection that cannot write, and would not do so afterwards either
    assert (await broker.nobody.get("/ready")).status == 503
    name = database_url.partition("@/")[2].partition("?")[0]
    await elsewhere.execute(WRITABLE.format(name=name))

    await until_so(creates_a_topic, "a topic can be created")
    await until_so(accepts, "a message is accepted")
    assert (await broker.nobody.get("/ready")).status == 200


async def test_a_postgres_without_space_is_said_until_a_batch_is_stored(
    broker: Any, database_url: str, message: Message
) -> None:
    owner = await asyncpg.connect(database_url)
    await owner.execute(
        "CREATE FUNCTION fill() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        "  RAISE SQLSTATE '53100' USING MESSAGE = 'could not extend file: No space left on device'; END $$;"
        "CREATE TRIGGER full_disk BEFORE INSERT ON mesh.topic_message FOR EACH ROW EXECUTE FUNCTION fill()"
    )
    alice = broker.member("alice")
    assert (await alice.send_one(message("id-1"))).problem.code == "outcome_unknown"
    health = await broker.nobody.get("/ready")
    assert (health.status, health.body["status"]) == (200, "degraded")
    assert "No space left on device" in health.body["reasons"][0]

    await owner.execute("DROP TRIGGER full_disk ON mesh.topic_message")
    await owner.close()
    assert (await alice.send_one(message("id-1"))).status == 201
    assert (await broker.nobody.get("/health")).body["status"] == "ok"


async def test_a_role_that_may_not_write_is_said_and_no_internal_error(
    broker: Any, database_url: str, message: Message
) -> None:
    owner = await asyncpg.connect(database_url)
    await owner.execute("REVOKE INSERT ON mesh.topic_message, mesh.topic FROM postroom")
    alice = broker.member("alice")
    assert (await alice.send_one(message("id-1"))).problem.code == "outcome_unknown"
    assert (await broker.nobody.get("/ready")).body["reasons"] == [
        "Postgres could not store the last batch: permission denied for table topic_message"
    ]
    with capture_logs() as log:
        refused = await broker.admin.post("/v1/topics", {"mesh": "demo", "name": "news"})
    assert (refused.status, refused.code) == (503, "database_unavailable")
    assert [line["error"] for line in log if line["event"] == "postgres_refused"] == [
        "permission denied for table topic"
    ]

    await owner.execute("GRANT INSERT ON mesh.topic_message, mesh.topic TO postroom")
    await owner.close()
    assert (await alice.send_one(message("id-1"))).status == 201


async def test_a_lock_that_is_not_given_in_time_is_a_503(
    migrated: Any, start_broker: Any, postgres: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_SERVER_SETTINGS, "lock_timeout", "50ms")
    async with start_broker(migrated) as broker:
        await broker.add_mesh()
        async with postgres.transaction():
            await postgres.execute("SELECT FROM mesh.mesh FOR KEY SHARE")
            refused = await broker.admin.delete("/v1/meshes/demo")

    assert (refused.status, refused.code, refused.body["retryable"]) == (503, "database_unavailable", True)
    assert refused.body["detail"] == "the broker's database cannot do this now: try again"


@pytest.mark.parametrize("scarce", ["connections", "turns"])
async def test_a_batch_waits_only_so_long_while_others_hang(
    migrated: Any, start_broker: Any, message: Message, monkeypatch: pytest.MonkeyPatch, scarce: str
) -> None:
    monkeypatch.setattr("broker.store._WAIT_SECONDS", 0.1)
    async with start_broker(msgspec.structs.replace(migrated, connections=2)) as broker, AsyncExitStack() as hanging:
        await broker.add_mesh()
        alice = broker.member("alice")
        await alice.send_one(message("id-1"))
        pool, turn = broker.services.database.accepting, broker.services.accepting._store._turn
        for _ in range(2):
            await hanging.enter_async_context(pool.acquire() if scarce == "connections" else turn(1))
        async with asyncio.timeout(20):
            answer = await alice.post("/v1/accept", {"messages": [message("id-2")]})

    assert answer.status == 503 or answer.body["answers"][0]["status"] == 503


async def test_a_postgres_that_fails_amid_many_things_is_not_asked_for_the_rest() -> None:
    """Each might wait for its time-out, and the caller has gone by then."""
    asked: list[str] = []

    async def effect(thing: str) -> str:
        asked.append(thing)
        if thing == "a":
            raise Conflict.of("taken", "it is taken")
        if thing == "c":
            raise asyncpg.QueryCanceledError("canceling statement due to statement timeout")
        return thing

    done, failed = await each("abcde", effect, str)
    assert (asked, done) == (["a", "b", "c"], ["b"])
    assert [(one.id, one.problem.code) for one in failed] == [
        ("a", "taken"),
        *((thing, "database_unavailable") for thing in "cde"),
    ]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"S", r"its certificate is not trusted \(IP address mismatch.*\): use an address or a name that it is for"),
        (b"N", r"it does not speak TLS, which database_url asks for"),
    ],
)
async def test_a_postgres_without_the_tls_that_was_asked_for_is_said_to_be(answer: bytes, why: str) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE, KEY)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1024)
        writer.write(answer)
        if answer == b"S":
            with suppress(ssl.SSLError, ConnectionError):
                await writer.start_tls(tls)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.2", 0) as server:
        port = server.sockets[0].getsockname()[1]
        url = f"postgresql://guest@127.0.0.2:{port}/own?sslmode=verify-full&sslrootcert={CERTIFICATE}"
        pool = await open_pool(url, name="test", connections=1, kept=0)
        said = await Database(pool, pool, pool).trouble()
        await close_pool(pool)
    assert re.fullmatch(f"Postgres cannot be used: {why}: the broker cannot accept messages", said or "")
