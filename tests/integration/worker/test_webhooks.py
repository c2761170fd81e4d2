"""Webhooks, the whole way: registered at a broker, accepted, published, and posted by workers to a real receiver."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import asyncpg
import msgspec
import pytest
import standardwebhooks
from aiohttp import web
from nats.js.errors import NotFoundError
from support.handlers import Call, CountingHandler, ok, serving
from support.http_consumers import Inbox, settled
from support.jetstream import Context
from support.mailroom import worker
from support.waiting import until_so

from broker.app import build
from broker.config import BrokerConfig
from broker.database import migrate
from broker.server import open_services
from postroom import BrokerClient
from postroom._wire.administration import NewWebhook
from postroom._wire.message import prepare
from postroom._wire.programs import LATENCIES
from postroom.chassis.routes import Histogram
from postroom.delivery.http.addresses import Guard
from postroom.delivery.http.webhooks import STRETCH, Webhook, WebhookConsumer
from postroom.delivery.nats import connect
from postroom.delivery.settings import AddressSettings, NatsSettings, WebhookSettings
from postroom.errors import NotFound, NotPermitted, Unavailable
from postroom.signatures import SIGNATURE, verify

ADMIN = "an administrator's token for tests"
LOOPBACK = "127.0.0.0/8"
QUICK = {
    "POSTROOM_WORKER_RECORD_CHECK_SECONDS": "0.2",
    "POSTROOM_WORKER_WEBHOOKS_ALLOW_NETWORKS": LOOPBACK,
    "POSTROOM_WORKER_WEBHOOKS_CHECK_SECONDS": "0.05",
    "POSTROOM_WORKER_WEBHOOKS_TIMEOUT_SECONDS": "20",
    "POSTROOM_WORKER_WEBHOOKS_BACKOFF_FIRST_SECONDS": "0.01",
    "POSTROOM_WORKER_WEBHOOKS_BACKOFF_MOST_SECONDS": "0.01",
}
IMPATIENT = {
    "POSTROOM_WORKER_WEBHOOKS_TIMEOUT_SECONDS": "0.9",
    "POSTROOM_WORKER_WEBHOOKS_ACK_WAIT_SECONDS": "1",
}
_numbers = itertools.count(1)


class Mesh:
    """A mesh at a broker in this process, with alice and the topic `orders`; workers are processes."""

    def __init__(
        self, slug: str, context: Context, client: BrokerClient, url: str, environment: dict[str, str]
    ) -> None:
        self.slug = slug
        self.context = context
        self.client = client
        self._url = url
        self._environment = environment
        self._token = ""

    async def prepare(self) -> None:
        await self.client.create_mesh(self.slug)
        self._token = (await self.client.create_member(self.slug, "alice")).token
        await self.client.create_topic(self.slug, "orders")
        await self.client.subscribe(self.slug, "orders", "alice")

    async def send(self, *bodies: str) -> None:
        """Have the broker accept a message of each body."""
        prepared = [prepare(msgspec.json.encode({"to": "topic:orders", "body": body})) for body in bodies]
        batch = {
            "messages": [
                {
                    "client_message_id": one.client_message_id,
                    "request_fingerprint": one.fingerprint.hex(),
                    "message": msgspec.Raw(one.payload),
                }
                for one in prepared
            ]
        }
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{self._url}/v1/accept", data=msgspec.json.encode(batch)) as answer,
        ):
            assert {one["status"] for one in (await answer.json())["answers"]} == {201}

    async def add(self, handler: CountingHandler) -> NewWebhook:
        return await self.client.create_webhook(self.slug, "orders", handler.url)

    async def begun(self, webhook: NewWebhook) -> None:
        """Return when the webhook has its consumer."""
        await until_so(lambda: self._is_there(webhook), "the consumer is there")

    async def gone(self, webhook: NewWebhook) -> None:
        async def is_gone() -> bool:
            return not await self._is_there(webhook)

        await until_so(is_gone, "the consumer is gone")

    def worker(self, **changes: str) -> AbstractContextManager[Any]:
        return worker(**{**self._environment, **QUICK, **changes})

    async def _is_there(self, webhook: NewWebhook) -> bool:
        try:
            await self.context.info(f"webhook__{webhook.id}")
        except NotFoundError:
            return False
        return True


@pytest.fixture
async def mesh(database_url: str, redis_url: str, nats_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    await migrate(database_url)
    token_file = tmp_path / "admin-token"
    token_file.touch(0o600)
    token_file.write_text(ADMIN)
    config = BrokerConfig(
        database_url=database_url,
        redis_url=redis_url,
        admin_token_file=token_file,
        webhooks=AddressSettings(allow_networks=[LOOPBACK]),
    )
    connection = await connect(NatsSettings(url=nats_url), name="test", patience=20)
    context = Context(connection, f"w{os.getpid()}_{next(_numbers)}")
    async with open_services(config) as services:
        runner = web.AppRunner(build(services), access_log=None, auto_decompress=False)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        environment = {"POSTROOM_DATABASE_URL": database_url, "POSTROOM_NATS_URL": nats_url}
        async with BrokerClient(url, ADMIN) as client:
            mesh = Mesh(context.name, context, client, url, environment)
            await mesh.prepare()
            yield mesh
        await runner.cleanup()
    await context.remove()
    await connection.close()


def bodies(handler: CountingHandler) -> Counter[str]:
    return Counter(body(call) for call in handler.calls)


def body(call: Call) -> str:
    return str(call.request.payload["message"]["body"])


async def test_messages_accepted_after_the_registration_are_posted_and_signed_with_its_secret(mesh: Mesh) -> None:
    async with serving() as handler:
        with mesh.worker() as (_, started):
            await mesh.send("before")
            await until_so(lambda: holds(mesh.context, mesh.context.events, 1), "it is published")
            webhook = await mesh.add(handler)
            await mesh.send("after")
            await handler.saw(1)
            await settled(mesh.context, f"webhook__{webhook.id}")
            metrics = await metrics_of(started["page"])

    (call,) = handler.calls
    assert (bodies(handler), call.request.event_type, call.attempt) == ({"after": 1}, "orders", 1)
    assert call.headers["Idempotency-Key"] == call.request.message_id
    verify(webhook.secret.encode(), call.body, call.headers[SIGNATURE])
    with pytest.raises(NotPermitted):
        verify(b"another secret of enough bytes", call.body, call.headers[SIGNATURE])
    theirs = standardwebhooks.Webhook(webhook.secret).verify(call.body, call.headers)
    assert theirs["message_id"] == call.request.message_id
    assert "postroom_worker_webhooks 1.0" in metrics
    assert 'postroom_worker_webhook_deliveries_total{outcome="done"} 2.0' in metrics


async def test_what_was_accepted_while_no_worker_ran_is_posted_when_one_does(mesh: Mesh) -> None:
    async with serving() as handler:
        await mesh.send("before")
        await mesh.add(handler)
        await mesh.send("1", "2", "3")
        with mesh.worker(), mesh.worker():
            await handler.saw(3)

    assert bodies(handler) == {"1": 1, "2": 1, "3": 1}


async def test_a_failed_post_is_repeated_and_what_is_refused_or_fails_to_the_end_becomes_a_dead_letter(
    mesh: Mesh,
) -> None:
    def answer(call: Call) -> web.StreamResponse:
        word = body(call)
        statuses = {"poison": 422, "lost": 500, "moved": 301, "later": 200 if call.attempt == 2 else 503}
        return web.Response(status=statuses[word], text=f"{word} will not do", headers={"Location": handler.url})

    async with serving(answer) as handler:
        with mesh.worker(POSTROOM_WORKER_WEBHOOKS_MAX_DELIVER="3"):
            webhook = await mesh.add(handler)
            await mesh.send("poison", "lost", "moved", "later")
            await until_so(lambda: holds(mesh.context, mesh.context.dlq, 3), "three are dead")
            await settled(mesh.context, f"webhook__{webhook.id}")

    assert bodies(handler) == {"poison": 1, "lost": 3, "moved": 3, "later": 2}
    letters = {msgspec.json.decode(letter.data())["message"]["body"]: letter for letter in await mesh.context.letters()}
    assert {letter.consumer for letter in letters.values()} == {f"webhook__{webhook.id}"}
    reasons = {word: (letter.reason, letter.attempts) for word, letter in letters.items()}
    assert reasons == {"poison": ("poison", 1), "lost": ("max_deliver", 3), "moved": ("max_deliver", 3)}
    assert letters["poison"].last_error == "http_422: poison will not do"


async def test_a_deleted_webhook_gets_nothing_more_and_leaves_nothing_behind_and_the_others_go_on(
    mesh: Mesh, database_url: str
) -> None:
    async with serving() as deleted, serving() as other, asyncpg.create_pool(database_url, min_size=1) as pool:
        with mesh.worker() as (_, one), mesh.worker() as (_, another):
            webhook, staying = await mesh.add(deleted), await mesh.add(other)
            await mesh.send("1")
            await asyncio.gather(deleted.saw(1), other.saw(1))
            await settled(mesh.context, f"webhook__{webhook.id}")
            await mesh.client.delete_webhook(mesh.slug, "orders", webhook.id)
            for page in (one["page"], another["page"]):
                await until_so(lambda page=page: delivers_to(page, 1), "each worker knows")
            await mesh.gone(webhook)
            await mesh.send("2")
            await other.saw(2)
            await settled(mesh.context, f"webhook__{staying.id}")
            await until_so(lambda: remembered(pool, staying), "the rows of the deleted one are gone")

    assert (bodies(deleted), bodies(other)) == ({"1": 1}, {"1": 1, "2": 1})


async def test_a_worker_that_has_not_heard_of_the_deletion_posts_nothing_to_a_deleted_webhook_again(
    mesh: Mesh, database_url: str
) -> None:
    async with serving() as handler, asyncpg.create_pool(database_url, min_size=1) as pool:
        webhook = await mesh.add(handler)
        await mesh.send("1")
        with mesh.worker(POSTROOM_WORKER_WEBHOOKS_CHECK_SECONDS="4") as (_, slow):
            await handler.saw(1)
            await settled(mesh.context, f"webhook__{webhook.id}")
            with mesh.worker() as (_, quick):
                await until_so(lambda: delivers_to(quick["page"], 1), "both know it")
                await mesh.client.delete_webhook(mesh.slug, "orders", webhook.id)
                await until_so(lambda: delivers_to(quick["page"], 0), "one knows that it is gone")
            await until_so(lambda: delivers_to(slow["page"], 0), "the other one knows it too")
            await mesh.gone(webhook)
            await until_so(lambda: remembered(pool), "nothing is remembered")

    assert bodies(handler) == {"1": 1}


async def test_a_webhook_that_a_clock_ahead_has_dated_gets_what_is_accepted_once_that_is_set_back(
    mesh: Mesh, database_url: str
) -> None:
    async with serving() as handler, asyncpg.create_pool(database_url, min_size=1) as pool:
        with mesh.worker():
            webhook = await mesh.add(handler)
            await mesh.begun(webhook)
            await pool.execute("UPDATE mesh.webhook SET created_at = now() + interval '1 day'")
            await until_so(lambda: pool.fetchval("SELECT created_at < now() FROM mesh.webhook"), "it is set back")
            await mesh.send("1")
            await handler.saw(1)
            await settled(mesh.context, f"webhook__{webhook.id}")
    assert bodies(handler) == {"1": 1}


async def test_a_webhook_of_which_postgres_does_not_tell_is_asked_for_nothing_yet(
    mesh: Mesh, database_url: str
) -> None:
    pool = await asyncpg.create_pool(database_url, min_size=0)
    row = Webhook(str(uuid4()), mesh.slug, "orders", "https://shop.example.com/", "secret", datetime.now(UTC))
    context, settings, guard = mesh.context, WebhookSettings(), Guard([])
    consumer = WebhookConsumer(
        row, context.js, context.events, pool=pool, settings=settings, guard=guard, took=Histogram(LATENCIES)
    )
    with pytest.raises(NotFound, match="was deleted"):
        await consumer.made()
    await pool.close()
    with pytest.raises(Unavailable, match="Postgres cannot be asked whether the webhook"):
        await consumer.made()
    await consumer.stop()


async def test_the_consumer_of_a_webhook_that_went_while_no_worker_ran_goes_too_with_its_rows(
    mesh: Mesh, database_url: str
) -> None:
    async with serving() as handler, asyncpg.create_pool(database_url, min_size=1) as pool:
        webhook = await mesh.add(handler)
        await mesh.send("1")
        with mesh.worker():
            await handler.saw(1)
            await until_so(lambda: remembered(pool, webhook), "it is remembered")
        await mesh.client.delete_topic(mesh.slug, "orders")
        with mesh.worker():
            await mesh.gone(webhook)
            await until_so(lambda: remembered(pool), "nothing is remembered")


async def test_an_address_that_the_worker_does_not_allow_is_never_connected_to(mesh: Mesh, database_url: str) -> None:
    async with serving() as handler, asyncpg.create_pool(database_url, min_size=1, max_size=1) as pool:
        changes = {
            "POSTROOM_WORKER_WEBHOOKS_ALLOW_NETWORKS": "10.0.0.0/8",
            "POSTROOM_WORKER_WEBHOOKS_MAX_DELIVER": "2",
        }
        with mesh.worker(**changes):
            await mesh.add(handler)
            await mesh.send("1")
            await until_so(lambda: holds(mesh.context, mesh.context.dlq, 1), "it is dead")
        (letter,) = await mesh.context.letters()
        row = await Inbox(pool, mesh.slug).row(letter.message_id or "")

    assert (handler.calls, letter.reason, letter.attempts) == ([], "max_deliver", 2)
    assert "127.0.0.1 is a loopback address" in letter.last_error
    assert row["last_error"] == letter.last_error


async def test_a_webhook_that_nothing_can_be_posted_to_stops_neither_the_others_nor_the_worker(
    mesh: Mesh, database_url: str
) -> None:
    async with serving() as handler, asyncpg.create_pool(database_url, min_size=1, max_size=1) as pool:
        broken = await mesh.add(handler)
        await pool.execute("UPDATE mesh.webhook SET url = 'http://host:99999/' WHERE id = $1", broken.id)
        with mesh.worker():
            await mesh.add(handler)
            await mesh.send("1")
            await handler.saw(1)


@pytest.mark.parametrize("moment", ["before the answer", "after the answer"])
async def test_a_worker_killed_while_it_posts_loses_nothing(mesh: Mesh, moment: str) -> None:
    wanted = [str(number) for number in range(20)]
    killers: list[Callable[[], None]] = []

    async def answer(call: Call) -> web.StreamResponse:
        if killers and len(handler.calls) % 5 == 0:
            if moment == "after the answer":
                asyncio.get_running_loop().call_soon(killers.pop())
                return ok(call)
            killers.pop()()
            return web.Response(status=503)
        return ok(call)

    async with serving(answer) as handler:
        await mesh.add(handler)
        await mesh.send(*wanted)
        for _ in range(3):
            with mesh.worker(**IMPATIENT) as (process, _):
                killers.append(process.kill)
                await asyncio.to_thread(process.wait, 60)
        with mesh.worker(**IMPATIENT):
            await until_so(lambda: handled(handler, wanted), "each has had its effect")

    assert set(handler.effects.values()) == {1}
    assert handler.most_at_once == 1


async def test_a_kill_uses_up_no_attempt_of_what_was_not_being_posted(mesh: Mesh) -> None:
    wanted = [str(number) for number in range(10)]
    once = {  # and a call has time enough on a busy machine: one that times out is an attempt
        "POSTROOM_WORKER_WEBHOOKS_TIMEOUT_SECONDS": "2.9",
        "POSTROOM_WORKER_WEBHOOKS_ACK_WAIT_SECONDS": "3",
        "POSTROOM_WORKER_WEBHOOKS_CALLS_AT_ONCE": "1",
        "POSTROOM_WORKER_WEBHOOKS_MAX_DELIVER": "1",
    }

    async with serving() as handler:
        await mesh.add(handler)
        await mesh.send(*wanted)
        with mesh.worker(**once) as (process, _):
            handler.answer = lambda _: process.kill() or web.Response(status=503)
            await asyncio.to_thread(process.wait, 60)
        handler.answer = ok
        with mesh.worker(**once):
            await until_so(lambda: holds(mesh.context, mesh.context.dlq, 1), "one is dead")
            await until_so(lambda: handled(handler, wanted[1:]), "the others have their effect")

    (letter,) = await mesh.context.letters()
    assert (letter.reason, letter.attempts, letter.last_error) == ("max_deliver", 1, "ack_timeout")
    assert {call.attempt for call in handler.calls} == {1}


async def test_the_rows_of_a_webhook_that_is_gone_go_from_an_inbox_of_more_than_one_stretch_too(
    mesh: Mesh, database_url: str
) -> None:
    async with asyncpg.create_pool(database_url, min_size=1) as pool:
        await pool.execute(
            "INSERT INTO postroom.inbox_messages (consumer, source_context, message_id, subject) "
            "SELECT 'billing', 'demo', number::text, repeat('x', 600) FROM generate_series(1, 60000) AS number"
        )
        await pool.execute(
            "INSERT INTO postroom.inbox_messages (consumer, source_context, message_id, subject) "
            "VALUES ('webhook__' || gen_random_uuid(), 'demo', 'last', 'any')"
        )
        last = await pool.fetchval("SELECT max(ctid) FROM postroom.inbox_messages")
        assert last[0] > STRETCH

        async def forgotten() -> bool:
            return await pool.fetchval("SELECT count(*) FROM postroom.inbox_messages") == 60000

        with mesh.worker():
            await until_so(forgotten, "the row is gone")


async def remembered(pool: asyncpg.Pool[asyncpg.Record], *webhooks: NewWebhook) -> bool:
    """Tell whether the inbox has rows of these webhooks alone."""
    rows = await pool.fetch("SELECT DISTINCT consumer FROM postroom.inbox_messages")
    return {row["consumer"] for row in rows} == {f"webhook__{webhook.id}" for webhook in webhooks}


async def handled(handler: CountingHandler, wanted: Sequence[str]) -> bool:
    return len(handler.effects) == len(wanted)


async def metrics_of(page: str) -> str:
    async with aiohttp.ClientSession(page) as session, session.get("/metrics") as answer:
        return await answer.text()


async def delivers_to(page: str, webhooks: int) -> bool:
    return f"postroom_worker_webhooks {webhooks}.0" in await metrics_of(page)


async def holds(context: Context, stream: str, messages: int) -> bool:
    try:
        return bool((await context.js.stream_info(stream)).state.messages == messages)
    except NotFoundError:  # a worker declares it in a moment
        return False


async def test_a_webhook_that_cannot_be_reached_waits_and_holds_up_no_other(mesh: Mesh) -> None:
    with socket.socket() as reserved:
        reserved.bind((LOOPBACK.partition("/")[0], 0))
        port = reserved.getsockname()[1]
    async with serving() as there, serving() as late:
        await mesh.client.create_webhook(mesh.slug, "orders", f"http://127.0.0.1:{port}/handle")
        await mesh.add(there)
        with mesh.worker(POSTROOM_WORKER_WEBHOOKS_MAX_DELIVER="1") as (_, started):
            await mesh.send(*map(str, range(20)))
            await there.saw(20)
            await until_so(lambda: _shows(started["page"], "postroom_worker_webhooks_unreachable 1.0"))
            app = web.Application()
            app.router.add_post("/handle", late.handle)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            await late.saw(20)
            await until_so(lambda: _shows(started["page"], "postroom_worker_webhooks_unreachable 0.0"))
            await runner.cleanup()

    assert bodies(late) == bodies(there) == Counter(map(str, range(20)))
    assert {call.attempt for call in late.calls} == {1}
    assert await mesh.context.letters() == []


async def _shows(page: str, line: str) -> bool:
    return line in await metrics_of(page)
