"""What a consumer does while others are away or stand still: it waits, blames no message, and commits nothing late."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from support import crashing_consumer
from support.databases import postgres_of_its_own
from support.handlers import Call, CountingHandler
from support.http_consumers import Inbox, config_of, consuming, settled
from support.jetstream import DURABLE, Context
from support.waiting import until_so

from embedded import EmbeddedPostgres
from embedded.processes import tethered
from postroom.chassis.postgres import migrate
from postroom.delivery import ROOM
from postroom.delivery.settings import HandlerSettings
from postroom.worker.consumer import HttpConsumer


@pytest.fixture
async def own_postgres(short_directory: Path) -> AsyncIterator[EmbeddedPostgres]:
    """A Postgres that the test may stop, with the migrated database `own`."""
    async with postgres_of_its_own(short_directory, lambda url: migrate(url, ROOM)) as server:
        yield server


async def test_a_postgres_that_is_away_is_waited_for_and_no_message_is_blamed(
    context: Context, nats_url: str, handler: CountingHandler, own_postgres: EmbeddedPostgres
) -> None:
    ids = [f"m-{number}" for number in range(50)]
    settings = HandlerSettings(url=handler.url)
    config = config_of(context, nats_url, own_postgres.url_of("own"), settings, max_deliver=1)
    async with consuming(config) as services:
        await context.publish(ids[:25])
        await settled(context)
        own_postgres.stop()
        await context.publish(ids[25:])
        await until_so(lambda: _waits(services), "the consumer misses Postgres")
        assert services.reasons() == ["Postgres is unreachable"]
        own_postgres.start()
        await settled(context)

        assert services.reasons() == []
    assert handler.effects == dict.fromkeys(ids, 1)
    assert await context.letters() == []


async def _waits(services: HttpConsumer) -> bool:
    return services.consumer.inbox.waiting_for_postgres


async def test_a_consumer_that_stood_still_cannot_commit_and_another_did_its_work(  # noqa: PLR0917 - fixtures
    context: Context, nats_url: str, inbox_database: str, handler: CountingHandler, inbox: Inbox, tmp_path: Path
) -> None:
    answers = [asyncio.Event(), asyncio.Event()]

    async def wait(call: Call) -> web.StreamResponse:
        await answers[call.attempt - 1].wait()
        return web.Response(status=200 if call.attempt == 2 else 422)

    handler.answer = wait
    settings = HandlerSettings(url=handler.url, timeout_seconds=0.5)
    config = config_of(context, nats_url, inbox_database, settings, ack_wait_seconds=0.6)
    file = tmp_path / "consumer.toml"
    file.write_text(
        f'context = "{context.name}"\ndatabase_url = "{inbox_database}"\n[nats]\nurl = "{nats_url}"\n'
        f'[handler]\nurl = "{handler.url}"\ntimeout_seconds = 0.5\n'
        f'[consumer]\nstream = "{context.events}"\ndurable = "{DURABLE}"\nack_wait_seconds = 0.6\n'
    )
    command = [sys.executable, crashing_consumer.__file__, str(file), "never", "1"]
    process = await asyncio.create_subprocess_exec(*tethered(command), stdout=asyncio.subprocess.PIPE)
    try:
        await context.publish(["m-1"])
        await handler.saw(1)
        process.send_signal(signal.SIGSTOP)
        answers[0].set()  # the answer of the first attempt, `dead`, waits in its socket
        async with consuming(config):
            await handler.saw(2)
            answers[1].set()
            await settled(context)
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        async with asyncio.timeout(60):
            async for line in process.stdout:
                if b"lease_lost" in line:
                    break
    finally:
        process.kill()
        await process.communicate()

    row = await inbox.row("m-1")
    assert (row["processed_at"] is not None, row["dead_at"], row["attempts"]) == (True, None, 2)
    assert (row["last_error"], await context.letters()) == ("ack_timeout", [])
