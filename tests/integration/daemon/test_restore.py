"""The drill: messages are done, Postgres is put back to before them, and an operator sends again what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import msgspec
import pytest
from aiohttp import web
from support.databases import back_up, forget, restore
from support.waiting import until_so

from broker.__main__ import begin_incarnation
from broker.app import build
from broker.config import BrokerConfig
from broker.database import migrate
from broker.server import open_services
from broker_client import BrokerClientSettings, BrokerLink, RelaySettings, features
from daemon.config import DaemonConfig, SocketSettings
from daemon.postroomd import Postroomd
from embedded import EmbeddedPostgres
from postroom import AsyncClient, BrokerClient, Gone, SendRequest
from postroom._wire.administration import HistoryQuery
from postroom._wire.message import prepare
from postroom._wire.sends import Health
from postroom.chassis.exits import Exit

ADMIN_TOKEN = "the administrator's token of this drill"
WHY = {"reason": "the backup of last night was restored"}


@dataclass
class Drill:
    """A broker that can be stopped while its database is put back, and the token of a member of it."""

    config: BrokerConfig
    postgres: EmbeddedPostgres
    token_file: Path
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def database(self) -> str:
        return self.config.database_url.partition("?")[0].rpartition("/")[2]

    def client(self) -> BrokerClient:
        return BrokerClient(self.url, self.token_file.read_text())

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            services = await stack.enter_async_context(open_services(self.config))
            runner = web.AppRunner(build(services), access_log=None, auto_decompress=False)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            self.port = runner.addresses[0][1]
            yield

    async def lose(self, work: Callable[[], Awaitable[None]]) -> None:
        """Put the database back to before `work`."""
        await back_up(self.postgres, self.database)
        async with self.serving():
            await work()
        await restore(self.postgres, self.database)
        await forget(self.postgres, self.database)


@pytest.fixture
async def drill(
    database_url: str,
    redis_url: str,
    postgres_server: EmbeddedPostgres,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Drill:
    monkeypatch.setattr(features, "_FRESH_SECONDS", 0.05)
    admin, token_file = tmp_path / "admin-token", tmp_path / "token"
    for file, text in ((admin, ADMIN_TOKEN), (token_file, "")):
        file.touch(mode=0o600)
        file.write_text(text)
    await migrate(database_url)
    config = BrokerConfig(database_url=database_url, redis_url=redis_url, admin_token_file=admin, listen_port=0)
    drill = Drill(config, postgres_server, token_file)
    async with drill.serving(), BrokerClient(drill.url, ADMIN_TOKEN) as client:
        await client.create_mesh("demo")
        token_file.write_text((await client.create_member("demo", "alice")).token)
        await client.create_topic("demo", "orders")
        await client.subscribe("demo", "orders", "alice")
    return drill


@pytest.fixture
async def daemon(drill: Drill, short_directory: Path) -> AsyncIterator[AsyncClient]:
    """A daemon in this process, as its client."""
    config = DaemonConfig(
        mesh="demo",
        broker=BrokerClientSettings(url=drill.url, token_file=drill.token_file),
        state_directory=short_directory / "state",
        socket=SocketSettings(path=short_directory / "demo.sock"),
        relay=RelaySettings(backoff_most_seconds=0.1),
    )
    running = await Postroomd.open(config)
    tasks = [asyncio.create_task(task) for task in running.tasks().values()]
    async with AsyncClient(short_directory / "demo.sock") as client:
        yield client
    await running.wind_down()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await running.close()


async def send_all(client: AsyncClient, *ids: str) -> None:
    sends = [SendRequest(to="topic:orders", body=f"hello from {each}", client_message_id=each) for each in ids]
    async for answer in client.send_many(sends):
        assert answer.problem is None
    for each in ids:
        assert (await client.wait(each, 60)).status == "done"


async def compared(client: AsyncClient, missing: int) -> Health:
    async def so() -> bool:
        health = await client.health()
        return not health.comparing and health.missing == missing

    await until_so(so)
    return await client.health()


@pytest.mark.parametrize("messages", [100, pytest.param(1000, marks=pytest.mark.soak)])
async def test_what_a_restored_database_lacks_is_found_told_and_sent_again_once(
    drill: Drill, daemon: AsyncClient, messages: int
) -> None:
    before, lost = ["before-0", "before-1"], [f"lost-{n:04}" for n in range(messages)]
    cursors: list[int] = []

    async def work() -> None:
        await send_all(daemon, *lost)
        async with drill.client() as reader:
            cursors.extend([each.history_id async for each in reader.history(HistoryQuery(limit=1000))])

    async with drill.serving():
        await send_all(daemon, *before)
        assert (await compared(daemon, 0)).status == "ok"
    await drill.lose(work)

    async with drill.serving():
        health = await compared(daemon, messages)
        assert health.status == "degraded"
        assert f"the broker's database lacks {messages:,} messages that it had accepted" in health.reasons[0]
        dry = await daemon.resend_missing(**WHY, dry_run=True)
        assert (dry.resent, (await daemon.health()).missing) == (messages, messages)
        async with drill.client() as reader:
            with pytest.raises(Gone, match="was restored to an earlier state") as told:
                [each async for each in reader.history(HistoryQuery(after=cursors[-1]))]

        result = await daemon.resend_missing(**WHY)
        assert (result.resent, result.without_payload) == (messages, 0)
        for each in lost:
            assert (await daemon.wait(each, 60)).status == "done"
        assert (await daemon.health()).status == "ok"

        async with drill.client() as reader:
            history = [each async for each in reader.history(HistoryQuery(limit=1000))]
            again = HistoryQuery(after=told.value.problem.resume_after, limit=1000)
            assert sorted([each.client_message_id async for each in reader.history(again)]) == lost
        assert sorted(each.client_message_id for each in history) == sorted([*before, *lost])
        assert not {each.history_id for each in history[2:]} & set(cursors)
        log = (await daemon.inspect(lost[0])).log
        assert [(line.verb, line.reason) for line in log] == [("resend", WHY["reason"])]
        assert (log[0].detail or "").endswith(f"history_id {cursors[2]}")
        assert (await daemon.resend_missing(**WHY)).resent == 0


async def test_a_database_that_was_put_back_in_silence_is_found_out(drill: Drill, daemon: AsyncClient) -> None:
    """As where its directory was copied back: nothing in Postgres shows that it is older, but its numbers do."""
    await drill.lose(lambda: send_all(daemon, "a", "b", "c"))
    connection = await asyncpg.connect(drill.config.database_url)
    await connection.execute("UPDATE mesh.incarnation SET place = mesh.place()")
    await connection.close()
    async with drill.serving():
        await compared(daemon, 3)
        assert await begin_incarnation(drill.config) is Exit.OK
        await compared(daemon, 3)
        assert (await daemon.resend_missing(**WHY)).resent == 3
        for each in "abc":
            assert (await daemon.wait(each, 60)).history_id > 2**50
        assert (await compared(daemon, 0)).status == "ok"


async def test_what_another_daemon_sent_again_is_not_missing_and_has_the_ids_that_the_broker_gave_it(
    drill: Drill, daemon: AsyncClient
) -> None:
    await drill.lose(lambda: send_all(daemon, "a", "b"))
    before = (await daemon.inspect("a")).row
    port, drill.port = drill.port, 0  # where this daemon does not look
    async with drill.serving(), BrokerLink(BrokerClientSettings(url=drill.url, token_file=drill.token_file)) as other:
        same = {"to": "topic:orders", "body": "hello from a", "client_message_id": "a"}
        (answer,) = await other.accept([prepare(msgspec.json.encode(same))])  # type: ignore[list-item]
    drill.port = port
    assert answer.broker_message_id != before.broker_message_id
    async with drill.serving():
        await compared(daemon, 1)
        found = await daemon.inspect("a")
        ids = (found.row.broker_message_id, found.row.history_id)
        assert (found.row.status, *ids) == ("done", answer.broker_message_id, answer.history_id)
        was = f"was {before.broker_message_id}, history_id {before.history_id}"
        assert [(line.verb, line.detail) for line in found.log] == [("compare", was)]
        async with drill.client() as reader:
            assert (await reader.message(ids[0])).client_message_id == "a"
        assert [line.verb for line in (await daemon.inspect("b")).log] == []


async def test_a_message_whose_id_another_one_of_the_member_has_taken_meanwhile_is_missing(
    drill: Drill, daemon: AsyncClient
) -> None:
    """What is sent again is refused then, so that an operator sees it and can requeue it under another id."""
    await drill.lose(lambda: send_all(daemon, "a"))
    port, drill.port = drill.port, 0  # where this daemon does not look
    async with drill.serving(), BrokerLink(BrokerClientSettings(url=drill.url, token_file=drill.token_file)) as other:
        another = {"to": "topic:orders", "body": "not from this daemon", "client_message_id": "a"}
        (answer,) = await other.accept([prepare(msgspec.json.encode(another))])  # type: ignore[list-item]
        assert answer.status == 201
    drill.port = port
    async with drill.serving():
        await compared(daemon, 1)
        assert (await daemon.resend_missing(**WHY)).resent == 1
        row = await daemon.wait("a", 60)
        assert (row.status, (row.last_error or "").partition(":")[0]) == ("dead", "idempotency_key_reused")


async def test_what_has_no_payload_any_more_is_reported_and_noted(drill: Drill, daemon: AsyncClient) -> None:
    async def work() -> None:
        await send_all(daemon, "old-0", "old-1")
        await daemon.prune(0, **WHY)
        await send_all(daemon, "new")

    await drill.lose(work)
    async with drill.serving():
        health = await compared(daemon, 3)
        assert health.missing_without_payload == 2
        result = await daemon.resend_missing(**WHY)
        assert (result.resent, result.without_payload_ids) == (1, ["old-0", "old-1"])
        assert (await daemon.wait("new", 60)).status == "done"
        row = await daemon.inspect("old-0")
        assert (row.row.status, row.log[-1].detail) == ("done", "not sent: its payload was pruned")
        assert (await daemon.health()).status == "ok"


async def test_a_better_backup_takes_back_what_the_first_one_lacked(drill: Drill, daemon: AsyncClient) -> None:
    """The first database that is put back is the wrong one: what the next one has is not missing."""
    await back_up(drill.postgres, drill.database)
    async with drill.serving():
        await send_all(daemon, "a", "b")
    name = drill.database
    await _rename(drill, f"{name}_backup", f"{name}_older")
    await back_up(drill.postgres, name)
    async with drill.serving():
        await send_all(daemon, "c")
    await _rename(drill, f"{name}_backup", f"{name}_newer")
    for backup, missing in (("older", 3), ("newer", 1)):
        await _rename(drill, f"{name}_{backup}", f"{name}_backup")
        await restore(drill.postgres, name)
        await forget(drill.postgres, name)
        async with drill.serving():
            await compared(daemon, missing)
    async with drill.serving():
        assert (await daemon.resend_missing(**WHY)).resent == 1
        assert (await daemon.wait("c", 60)).status == "done"


async def _rename(drill: Drill, name: str, to: str) -> None:
    connection = await asyncpg.connect(drill.postgres.url)
    await connection.execute(f'ALTER DATABASE "{name}" RENAME TO "{to}"')
    await connection.close()
