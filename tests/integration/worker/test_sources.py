"""A worker that publishes from the databases of applications too: what they commit, once and in order."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import asyncpg
import nats
import pytest
from support.applications import application_database, fetch, owner_of
from support.jetstream import messages_in
from support.mailroom import worker
from support.waiting import until_so

from broker.database import QUERIES, migrate
from embedded import EmbeddedNats, EmbeddedPostgres
from postroom.delivery.applications import install

EMIT = "SELECT postroom.emit('demo', 'order', $1, 'order_placed', jsonb_build_object('order', $2::integer))::text"
UNPUBLISHED = "SELECT count(*) FROM postroom.outbox_events WHERE published_at IS NULL"
QUICK = {"POSTROOM_WORKER_RECORD_CHECK_SECONDS": "0.1", "POSTROOM_WORKER_EVENTS_IDLE_SECONDS": "0.05"}


@pytest.fixture
async def broker(database_url: str) -> str:
    """The database of a broker with the mesh `demo`."""
    await migrate(database_url)
    connection = await asyncpg.connect(database_url)
    await connection.execute(QUERIES["create_mesh"], "demo")
    await connection.close()
    return database_url


@pytest.fixture
async def shop(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    async with application_database(postgres_server) as url:
        yield url


@pytest.fixture
async def books(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    async with application_database(postgres_server) as url:
        yield url


def config(path: Path, server: EmbeddedNats, broker: str | None, **sources: str) -> tuple[str, str]:
    """Write the config of a worker; return the arguments that name it."""
    own = "" if broker is None else f'database_url = "{broker}"\n'
    tables = [f'[[sources]]\nname = "{name}"\ndatabase_url = "{url}"\n' for name, url in sources.items()]
    file = path / "worker.toml"
    file.write_text(f'{own}[nats]\nurl = "{server.url}"\n{"".join(tables)}')
    return "--config", str(file)


async def emit(url: str, *orders: int, commit: bool = True) -> list[str]:
    """Place orders, each in a transaction of its own with its event; return the ids of the events."""
    connection = await asyncpg.connect(url)
    ids = []
    for order in orders:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("INSERT INTO orders VALUES ($1)", order)
        ids.append(await connection.fetchval(EMIT, "one", order))
        await (transaction.commit() if commit else transaction.rollback())
    await connection.close()
    return ids


async def published(*urls: str) -> None:
    for url in urls:
        await until_so(lambda url=url: _none_waits(url))


async def _none_waits(url: str) -> bool:
    return await fetch(owner_of(url), UNPUBLISHED) == 0


async def test_a_worker_publishes_what_two_applications_commit_beside_what_the_broker_accepts(
    broker: str, shop: str, books: str, own_nats: EmbeddedNats, tmp_path: Path
) -> None:
    of_broker = await fetch(broker, EMIT, "one", 0)
    arguments = config(tmp_path, own_nats, broker, shop=owner_of(shop), books=owner_of(books))
    with worker(*arguments, **QUICK) as (process, started):
        ids = [*await emit(shop, 1, 2, 3), *await emit(books, 1, 2, 3)]
        lost = await emit(shop, 4, 5, commit=False)
        await published(broker, shop, books)
        async with aiohttp.ClientSession() as session, session.get(f"{started['page']}/metrics") as answer:
            metrics = await answer.text()
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0

    messages = {
        one.headers["Nats-Msg-Id"]: json.loads(one.data)["order"] for one in await messages_in(own_nats, "DEMO_EVENTS")
    }
    assert messages == {of_broker: 0, **dict(zip(ids, [1, 2, 3, 1, 2, 3], strict=True))}
    assert not set(lost) & set(messages)
    assert 'postroom_worker_published_total{source="events"} 1.0' in metrics
    for name in ("shop", "books"):
        assert f'postroom_worker_published_total{{database="{name}",source="events"}} 3.0' in metrics
        assert f'postroom_worker_backlog_messages{{database="{name}",source="events"}} 0.0' in metrics


async def test_a_mesh_that_the_broker_has_not_is_refused_at_emit_once_a_worker_has_looked(
    broker: str, shop: str, own_nats: EmbeddedNats, tmp_path: Path
) -> None:
    elsewhere = EMIT.replace("demo", "shop")
    await fetch(owner_of(shop), elsewhere, "one", 1)  # nobody can tell yet
    with worker(*config(tmp_path, own_nats, broker, shop=owner_of(shop)), **QUICK):
        known = "SELECT count(*) FROM postroom.known_meshes"
        await until_so(lambda: _is(owner_of(shop), known, 1))
        with pytest.raises(asyncpg.ForeignKeyViolationError, match="UNKNOWN_MESH: there is no mesh shop, ") as refused:
            await fetch(shop, elsewhere, "one", 2)
        assert refused.value.constraint_name == "UNKNOWN_MESH"
        await emit(shop, 1)

        connection = await asyncpg.connect(broker)
        await connection.execute(QUERIES["create_mesh"], "shop")
        await connection.close()
        await until_so(lambda: _is(owner_of(shop), known, 2))
        await fetch(shop, elsewhere, "one", 3)
        await published(shop)
    assert [json.loads(one.data)["order"] for one in await messages_in(own_nats, "SHOP_EVENTS")] == [1, 3]


async def _is(url: str, query: str, value: object) -> bool:
    return bool(await fetch(url, query) == value)


async def test_what_was_committed_is_published_once_though_workers_are_killed_before_their_mark(
    broker: str, shop: str, own_nats: EmbeddedNats, tmp_path: Path
) -> None:
    arguments = config(tmp_path, own_nats, broker, shop=owner_of(shop))
    environment = {**QUICK, "POSTROOM_WORKER_EVENTS_BATCH": "20"}
    ids = await emit(shop, *range(200))
    half = "SELECT count(*) >= $1 FROM postroom.outbox_events WHERE published_at IS NOT NULL"
    for share in (1, 60, 120):
        with worker(*arguments, **environment) as (process, _):
            await until_so(lambda share=share: fetch(owner_of(shop), half, share))
            process.kill()
    with worker(*arguments, **environment):
        await published(shop)
    assert [one.headers["Nats-Msg-Id"] for one in await messages_in(own_nats, "DEMO_EVENTS")] == ids


async def test_an_application_whose_database_is_unreachable_keeps_up_nobody_else(
    broker: str, shop: str, own_nats: EmbeddedNats, tmp_path: Path, short_directory: Path
) -> None:
    away = EmbeddedPostgres(short_directory / "postgres", durable=False)
    away.start()
    await install(away.url, meshes=["demo"])
    connection = await asyncpg.connect(away.url)
    await connection.execute("CREATE TABLE orders (id integer PRIMARY KEY)")
    await connection.close()
    waiting = await emit(away.url, 7)
    away.stop()
    arguments = config(tmp_path, own_nats, broker, shop=owner_of(shop), away=away.url)
    with worker(*arguments, **QUICK) as (process, started):
        ids = await emit(shop, 1)
        await published(shop)
        status, text = await _ask(started["page"], "/ready")
        assert status == 503
        assert "source away: events wait: Postgres failed: " in text
        assert [one.headers["Nats-Msg-Id"] for one in await messages_in(own_nats, "DEMO_EVENTS")] == ids
        away.start()
        try:
            await published(away.url)
            away.stop()  # and away again, while it runs
            ids += await emit(shop, 2)
            await published(shop)
            assert process.poll() is None
            away.start()
            waiting += await emit(away.url, 8)
            await published(away.url)
            await until_so(lambda: _ready(started["page"]))
            process.terminate()
            assert await asyncio.to_thread(process.wait) == 0
        finally:
            away.stop()
    assert {one.headers["Nats-Msg-Id"] for one in await messages_in(own_nats, "DEMO_EVENTS")} == {*ids, *waiting}


async def _ask(page: str, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(page + path) as answer:
        return answer.status, await answer.text()


async def _ready(page: str) -> bool:
    return (await _ask(page, "/ready"))[0] == 200


async def test_a_worker_may_have_sources_alone(shop: str, own_nats: EmbeddedNats, tmp_path: Path) -> None:
    file = tmp_path / "worker.toml"
    arguments = config(tmp_path, own_nats, None, shop=owner_of(shop))
    file.write_text(f'{file.read_text()}[[streams]]\nname = "SHOP"\nsubjects = ["demo.event.>"]\n')
    with worker(*arguments, **QUICK):
        ids = await emit(shop, 1)
        await published(shop)
    assert [one.headers["Nats-Msg-Id"] for one in await messages_in(own_nats, "SHOP")] == ids


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nobody", "source shop: the database refused the login"),
        ("postroom", "source shop: the database has version 0 of the delivery schema, "),
    ],
)  # fmt: skip
async def test_a_source_without_an_outbox_or_a_login_ends_the_worker_with_78(
    database_url: str, own_nats: EmbeddedNats, tmp_path: Path, name: str, sentence: str
) -> None:
    url = database_url.replace("postroom@", f"{name}@")
    arguments = config(tmp_path, own_nats, None, shop=url)
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "postroom.worker", "run", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"]},
        check=False,
        timeout=60,
    )
    assert ended.returncode == 78
    assert sentence in ended.stderr.splitlines()[-1]


async def test_what_a_stream_lost_of_an_application_is_published_again(
    broker: str, shop: str, own_nats: EmbeddedNats, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        client = await nats.connect(own_nats.url)
        stack.push_async_callback(client.close)
        with worker(*config(tmp_path, own_nats, broker, shop=owner_of(shop)), **QUICK):
            ids = await emit(shop, 1, 2)
            await published(shop)
            await client.jetstream().delete_stream("DEMO_EVENTS")
            lost = "SELECT min(epoch) FROM postroom.outbox_events WHERE published_at IS NOT NULL"
            await until_so(lambda: _is(owner_of(shop), lost, 1))
            await published(shop)
    assert [one.headers["Nats-Msg-Id"] for one in await messages_in(own_nats, "DEMO_EVENTS")] == [
        f"{id_}/1" for id_ in ids
    ]
