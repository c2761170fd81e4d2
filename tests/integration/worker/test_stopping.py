"""A worker that is to stop stops soon, whatever it waits for, and what it had in hand is done by the next one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from aiohttp import web
from nats.aio.client import Client
from support.databases import frozen, postgres_of_its_own
from support.handlers import Call, serving
from support.jetstream import Context
from support.mailroom import worker
from support.waiting import until, until_so
from support.zygote import Forked

from embedded import EmbeddedPostgres
from postroom.chassis.postgres import migrate
from postroom.ledger import ROOMS
from postroom.ledger.primitives import Start, start_job

EMIT = "SELECT postroom.emit($1, 'order', 'o-1', 'order_placed', '{}')"
PUBLISHED = "SELECT count(*) FROM postroom.outbox_events WHERE published_at IS NOT NULL"
PROCESSED = "SELECT EXISTS (SELECT FROM postroom.inbox_messages WHERE processed_at IS NOT NULL)"
SUPPORT = Path(__file__).parents[2] / "support"
SOON = 30.0  # seconds: half of what systemd allows, and more than a busy machine needs


@pytest.fixture
async def context(connection: Client) -> AsyncIterator[Context]:
    context = Context(connection)
    yield context
    await context.remove()


async def ended(process: Forked) -> int:
    process.terminate()
    return await asyncio.to_thread(process.wait, SOON)


@pytest.fixture
async def own_postgres(short_directory: Path) -> AsyncIterator[EmbeddedPostgres]:
    """A Postgres that a test may freeze, with the migrated database `own`."""

    async def migrate_all(url: str) -> None:
        await migrate(url, *ROOMS)

    async with postgres_of_its_own(short_directory, migrate_all) as server:
        yield server


async def ask(server: EmbeddedPostgres, query: str, *values: object) -> Any:
    """Ask the server in a connection of its own: it has been frozen, or will be."""
    connection = await asyncpg.connect(server.url_of("own"))
    try:
        return await connection.fetchval(query, *values)
    finally:
        await connection.close()


async def test_a_postgres_that_stands_still_is_not_waited_for(
    own_postgres: EmbeddedPostgres, context: Context, nats_url: str
) -> None:
    servers = {"POSTROOM_DATABASE_URL": own_postgres.url_of("own"), "POSTROOM_NATS_URL": nats_url}
    await context.declare()
    with worker(**servers) as (process, _):
        await ask(own_postgres, EMIT, context.name)
        with frozen(own_postgres):
            assert await ended(process) == 0
    with worker(**servers):
        await until_so(lambda: ask(own_postgres, PUBLISHED))
    assert (await context.js.stream_info(context.events)).state.messages == 1


async def test_a_message_whose_outcome_cannot_be_kept_comes_again(
    own_postgres: EmbeddedPostgres, context: Context, nats_url: str, tmp_path: Path
) -> None:
    answering = asyncio.Event()

    async def answer(_call: Call) -> web.StreamResponse:
        await answering.wait()
        return web.Response(status=200)

    await context.declare()
    await context.publish(["m-1"])
    config = tmp_path / "worker.toml"
    async with serving(answer) as handler:
        config.write_text(
            f'[nats]\nurl = "{nats_url}"\n[[consumers]]\ncontext = "{context.name}"\n'
            f'database_url = "{own_postgres.url_of("own")}"\nhandler.url = "{handler.url}"\n'
            f'consumer.stream = "{context.events}"\nconsumer.durable = "books"\n'
        )
        with worker("--config", str(config), ready="consuming") as (process, _):
            await handler.saw(1)
            with frozen(own_postgres):
                answering.set()
                assert await ended(process) == 0
        with worker("--config", str(config), ready="consuming"):
            await until_so(lambda: ask(own_postgres, PROCESSED))
    assert handler.ids() == ["m-1", "m-1"]
    assert handler.effects == {"m-1": 1}


async def begin(url: str, context: Context, flow: str, request: dict[str, str]) -> UUID:
    """Start a job of a flow whose one step is `work`."""
    job = uuid4()
    connection = await asyncpg.connect(url)
    await start_job(connection, Start(job, context.name, flow, uuid4(), "work", json.dumps(request)))
    await connection.close()
    await context.declare()
    return job


def running(url: str, nats_url: str, flow: str) -> dict[str, str]:
    """Return what a worker of a flow is told that is to wait briefly at its stop."""
    return {
        "PYTHONPATH": str(SUPPORT),
        "POSTROOM_DATABASE_URL": url,
        "POSTROOM_NATS_URL": nats_url,
        "POSTROOM_WORKER_FLOWS": flow,
        "POSTROOM_WORKER_STOP_SECONDS": "0.1",
    }


async def test_a_step_without_an_end_is_waited_for_as_long_as_the_config_says(
    own_postgres: EmbeddedPostgres, context: Context, nats_url: str, tmp_path: Path
) -> None:
    url, begun, go_on = own_postgres.url_of("own"), tmp_path / "begun", tmp_path / "go_on"
    job = await begin(url, context, "slow", {"begun": str(begun), "go_on": str(go_on)})
    settings = running(url, nats_url, "slow_flow:flow") | {"POSTROOM_WORKER_JOBS_LEASE_SECONDS": "0.5"}
    with worker(**settings) as (process, _):
        await until(begun.exists)
        assert await ended(process) == 0
    go_on.touch()
    with worker(**settings | {"POSTROOM_WORKER_STOP_SECONDS": "30"}):
        await until_so(lambda: ask(own_postgres, "SELECT state = 'completed' FROM ledger.job WHERE id = $1", job))


@pytest.mark.parametrize("how", ["a thread of asyncio's", "a thread of its own", "refusing to be cancelled"])
async def test_a_step_that_nothing_ends_keeps_no_worker(
    own_postgres: EmbeddedPostgres, context: Context, nats_url: str, tmp_path: Path, how: str
) -> None:
    url, begun = own_postgres.url_of("own"), tmp_path / "begun"
    await begin(url, context, "endless", {"begun": str(begun), "how": how})
    with worker(**running(url, nats_url, "endless_flow:flow")) as (process, _):
        await until(begun.exists)
        assert await ended(process) == 0
