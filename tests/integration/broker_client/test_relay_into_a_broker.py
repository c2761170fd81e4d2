"""The relay and the link against the real broker, on real Postgres and Redis."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest
from aiohttp import ClientSession, web
from opentelemetry.trace import StatusCode
from support.relaying import busy
from support.traces import TRACE, attributes, parent_of
from support.waiting import until, until_so

from broker.app import build
from broker.config import BrokerConfig, LimiterConfig
from broker.database import migrate
from broker.server import open_services
from broker_client.channel import RequestFailed
from outbox import Caller, RowFilter
from postroom import BrokerClient, NotFound
from postroom._wire.message import prepare
from postroom.chassis.logs import mask
from postroom.errors import Conflict

ACCEPTED = "SELECT client_message_id FROM mesh.client_message_dedupe ORDER BY 1"
HISTORY = "SELECT count(*) FROM mesh.message_history"


class RealBroker:
    """A broker in this process that can be stopped and started again at the same address."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        services = await self._stack.enter_async_context(open_services(self._config))
        runner = web.AppRunner(build(services), access_log=None, auto_decompress=False)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.port = runner.addresses[0][1]

    async def stop(self) -> None:
        await self._stack.aclose()


@pytest.fixture
async def real_broker(
    database_url: str, redis_url: str, tmp_path: Path, token_file: Path
) -> AsyncIterator[Callable[..., Awaitable[RealBroker]]]:
    """Start a broker with the mesh `demo`, the topic `orders`, and alice, whose token is in `token_file`."""
    admin = tmp_path / "admin-token"
    admin.touch(mode=0o600)
    admin_token = secrets.token_urlsafe(32)
    await asyncio.to_thread(admin.write_text, admin_token)
    await migrate(database_url)
    brokers: list[RealBroker] = []

    async def start(**limiter: int) -> RealBroker:
        config = BrokerConfig(
            database_url=database_url,
            redis_url=redis_url,
            admin_token_file=admin,
            listen_port=0,
            limiter=LimiterConfig(**limiter),
        )
        broker = RealBroker(config)
        brokers.append(broker)
        await broker.start()
        async with BrokerClient(broker.url, admin_token) as administrator:
            await administrator.create_mesh("demo")
            member = await administrator.create_member("demo", "alice")
            await administrator.create_topic("demo", "orders")
            await administrator.subscribe("demo", "orders", "alice")
        await asyncio.to_thread(token_file.write_text, member.token)
        return broker

    yield start
    for broker in brokers:
        await broker.stop()


@pytest.fixture
async def postgres(database_url: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


def ids_of(count: int) -> list[str]:
    return [f"id-{n:04}" for n in range(count)]


async def assert_each_is_accepted_once(postgres: asyncpg.Connection, ids: list[str]) -> None:
    assert [row[0] for row in await postgres.fetch(ACCEPTED)] == ids
    assert await postgres.fetchval(HISTORY) == len(ids)


async def test_a_backlog_reaches_postgres_once_and_what_the_broker_refuses_is_dead(real_broker, station, postgres):
    broker = await real_broker()
    here = await station(broker.url, speed=1)
    ids = ids_of(1500)
    await here.send(*ids)
    await here.send("nowhere", to="topic:absent")
    here.run()
    rows = await here.settled(*ids)
    assert {(row.status, row.attempts) for row in rows} == {("done", 1)}
    assert len({row.history_id for row in rows}) == 1500
    (refused,) = await here.settled("nowhere")
    assert refused.status == "dead"
    assert refused.last_error.startswith("topic_not_found: ")
    await assert_each_is_accepted_once(postgres, ids)
    assert here.relay.features.member == "alice"
    assert here.relay.max_age_hours == 648


async def test_a_message_with_a_trace_has_a_span_for_each_post_and_each_accept(real_broker, station, recorded):
    broker = await real_broker()
    here = await station(broker.url, speed=1)
    for name, to, traceparent in (
        ("a", "topic:orders", TRACE),
        ("b", "topic:absent", TRACE),
        ("c", "topic:orders", None),
    ):
        message = prepare(b'{"to":"%b"}' % to.encode(), idempotency_key=name, traceparent=traceparent)
        await here.outbox.accept([message], Caller(0, 0))
    here.run()
    (row,), _, _ = [await here.settled(name) for name in "abc"]

    spans = recorded.get_finished_spans()
    assert sorted(span.name for span in spans) == [
        f"{step} topic:{topic}" for step in ("accept", "relay") for topic in ("absent", "orders")
    ]
    assert {parent_of(span) for span in spans} == {TRACE}
    for span in spans:
        failed = span.name.endswith("absent")
        assert (span.status.status_code is StatusCode.ERROR) == failed
        said = attributes(span)
        assert said["messaging.message.id"] == ("b" if failed else "a")
        assert said.get("error.type") == ("topic_not_found" if failed else None)
        if span.name == "accept topic:orders":
            assert said["postroom.broker_message_id"] == row.broker_message_id
        assert span.start_time < span.end_time


async def test_a_post_that_fails_is_a_failed_span_of_each_message(scripted_broker, station, recorded):
    usual, scripted_broker.judge = scripted_broker.judge, lambda _items: busy()
    here = await station(scripted_broker.url)
    await here.outbox.accept([prepare(b'{"to":"topic:orders"}', traceparent=TRACE)], Caller(0, 0))
    here.run()
    await until(lambda: len(recorded.get_finished_spans()) > 1)
    scripted_broker.judge = usual
    await until(lambda: recorded.get_finished_spans()[-1].status.status_code is StatusCode.UNSET)

    first, *_ = spans = recorded.get_finished_spans()
    assert {(span.name, parent_of(span)) for span in spans} == {("relay topic:orders", TRACE)}
    assert attributes(first)["error.type"] == "broker_overloaded"
    assert first.status.description.endswith("answered 503 (overloaded): later")


async def test_a_crash_after_the_brokers_commit_makes_no_second_message(
    real_broker, station, postgres, tmp_path, token_file
):
    broker = await real_broker()
    here = await station(broker.url)
    ids = ids_of(300)
    await here.send(*ids)
    await here.end()
    process: asyncio.subprocess.Process | None = None

    async def pass_on(request: web.Request) -> web.Response:
        async with (
            ClientSession() as session,
            session.request(
                request.method, broker.url + request.path, data=await request.read(), headers=request.headers
            ) as answer,
        ):
            body = await answer.read()
        if request.path == "/v1/accept":
            assert process is not None
            process.kill()  # the broker has committed, and its answer is never heard
            await process.wait()
        return web.Response(status=answer.status, body=body, content_type="application/json")

    app = web.Application(client_max_size=8 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    program = [sys.executable, str(Path(__file__).with_name("relay_process.py"))]
    process = await asyncio.create_subprocess_exec(
        *program, f"http://127.0.0.1:{port}", str(tmp_path / "state"), str(token_file)
    )
    await process.wait()
    await runner.cleanup()
    await assert_each_is_accepted_once(postgres, ids)
    here = await station(broker.url)
    assert {row.status async for page in here.outbox.pages(RowFilter()) for row in page.rows} == {"pending"}
    here.run()
    assert {(row.status, row.attempts) for row in await here.settled(*ids)} == {("done", 2)}
    assert here.relay.counters.attempts["duplicate"] == 300
    await assert_each_is_accepted_once(postgres, ids)


async def test_a_requeue_after_a_lost_answer_makes_no_second_message(real_broker, station, postgres):
    """The broker commits and its answer is lost: what the operator requeues is found there, and done."""
    broker = await real_broker()

    async def lose_answers(request: web.Request) -> web.Response:
        async with (
            ClientSession() as session,
            session.request(
                request.method, broker.url + request.path, data=await request.read(), headers=request.headers
            ) as answer,
        ):
            body = await answer.read()
        if request.path == "/v1/accept":
            request.transport.abort()
        return web.Response(status=answer.status, body=body, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", lose_answers)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    here = await station(f"http://127.0.0.1:{runner.addresses[0][1]}")
    await here.send("id-1")
    here.run()
    await until_so(lambda: _is_unanswered(here, "id-1"))
    await here.relay.stop()
    with pytest.raises(Conflict, match="had accepted it"):
        await here.outbox.act("requeue", "id-1", caller=Caller(0, 0), reason="it hung")
    (row,) = await here.settled("id-1")
    assert (row.status, row.duplicate, row.history_id) == ("done", True, 1)
    await assert_each_is_accepted_once(postgres, ["id-1"])
    await runner.cleanup()


async def _is_unanswered(here, client_message_id: str) -> bool:
    return (await here.outbox.row(client_message_id)).unanswered_at is not None


async def test_a_broker_that_goes_away_in_the_middle_and_comes_back_has_every_message_once(
    real_broker, station, postgres
):
    broker = await real_broker()
    here = await station(broker.url, batch_messages=50)
    ids = ids_of(2000)
    await here.send(*ids)
    here.run()
    await here.settled(ids[0])
    await broker.stop()
    await until(lambda: here.relay.status().state == "waiting")
    assert (await here.outbox.counts()).rows["dead"] == 0
    await broker.start()
    assert {row.status for row in await here.settled(*ids)} == {"done"}
    await assert_each_is_accepted_once(postgres, ids)


async def test_a_saturated_limit_delays_and_kills_nothing(real_broker, station, postgres):
    broker = await real_broker(per_member=100, window_seconds=1)
    here = await station(broker.url, speed=1, batch_messages=60)
    ids = ids_of(250)
    await here.send(*ids)
    here.run()
    assert {row.status for row in await here.settled(*ids)} == {"done"}
    assert here.relay.counters.attempts["rate_limited"] > 0
    await assert_each_is_accepted_once(postgres, ids)


async def test_a_member_subscribes_and_unsubscribes_through_the_link(real_broker, link_to):
    broker = await real_broker()
    link = link_to(broker.url)
    assert [(topic.name, topic.subscribers) for topic in (await link.topics()).topics] == [("orders", 1)]
    await link.unsubscribe("orders")
    assert [topic.subscribers for topic in (await link.topics()).topics] == [0]
    assert (await link.subscribe("orders")).member == "alice"
    assert [topic.subscribers for topic in (await link.topics()).topics] == [1]
    with pytest.raises(NotFound):
        await link.subscribe("absent")


async def test_why_a_token_is_refused_can_be_read_in_a_log(real_broker, link_to, token_file, claimed):
    broker = await real_broker()
    token_file.write_text("another-token\n")
    with pytest.raises(RequestFailed) as refused:
        await link_to(broker.url).accept(claimed(1))
    sentence = str(refused.value)
    assert "answered 401 (invalid_token): the token is not valid: it may have been revoked" in sentence
    assert mask(sentence) == sentence
