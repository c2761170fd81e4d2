"""The parts of delivering one by one: each works through a backlog, for a rate in messages a second.

What is measured runs as a process of its own; its start is not in the figures, nor is what fills the backlog.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import asyncpg
import nats
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from bench.load import BODY_BYTES
from bench.mailroom import MESH
from bench.processes import await_http, free_port, handler, program
from embedded import EmbeddedNats, EmbeddedPostgres
from postroom._wire.sql import read_sql
from postroom.chassis.postgres import migrate
from postroom.delivery import ROOM
from postroom.delivery.streams import default_streams, ensure_stream
from postroom.delivery.subjects import event_subject, stream_name

MESSAGES: Final = 20_000
_AGGREGATES: Final = 100
_PIPELINED: Final = 1000  # publishes under way at once
_STREAM: Final = stream_name(MESH, "events")
_SUBJECT: Final = event_subject(MESH, "placed", 1)
_BODY: Final = json.dumps({"note": "x" * BODY_BYTES}).encode()
_EMIT: Final = read_sql("bench", "emit.sql")
_POLL_SECONDS: Final = 0.02
_PATIENCE: Final = 120.0  # seconds


async def publisher_rates(directory: Path) -> tuple[float, float]:
    """Let a worker publish events out of Postgres, and nats-py the same ones into the same stream, pipelined."""
    async with running_streams(directory) as (url, js), _database(directory) as database:
        theirs = MESSAGES / await _publish(js)
        connection = await asyncpg.connect(database)
        with _worker(directory, url, database):
            await connection.execute(_EMIT, MESH, _AGGREGATES, _BODY.decode(), MESSAGES)
            began = time.perf_counter()
            await until_count(lambda: _stored(js), 2 * MESSAGES)
            ours = MESSAGES / (time.perf_counter() - began)
        await connection.close()
    return ours, theirs


async def consumer_rate(directory: Path) -> float:
    """Let a consumer give a stream's events to a handler behind HTTP, in a process of its own, that does nothing."""
    async with running_streams(directory) as (url, js), _database(directory) as database:
        await _publish(js)
        with handler(directory) as receiver:
            environment = {"POSTROOM_NATS_URL": url, "POSTROOM_DATABASE_URL": database}
            words = ["--context", MESH, "--name", "bench", "--handler", receiver.url]
            with program(directory / "consumer.log", "cli", "consumer", "run", *words, environment=environment):
                await until_count(lambda: asyncio.to_thread(lambda: receiver.calls().count), MESSAGES)
            calls = receiver.calls()
    return calls.count / (calls.last - calls.first)


async def agent_rate(directory: Path) -> float:
    """Let an agent whose `receive` does nothing handle a stream's events."""
    async with running_streams(directory) as (url, js):
        await _publish(js)
        environment = {"POSTROOM_NATS_URL": url, "POSTROOM_AGENT_STATE_DIRECTORY": str(directory / "agent")}
        words = ["agent", "run", "bench.quiet_agent:Quiet", "--tenant", MESH]
        with program(directory / "agent.log", "cli", *words, environment=environment):
            before = await until_count(lambda: _settled(js), 1)
            began = time.perf_counter()
            await until_count(lambda: _settled(js), MESSAGES)
            return (MESSAGES - before) / (time.perf_counter() - began)


@asynccontextmanager
async def running_streams(directory: Path) -> AsyncIterator[tuple[str, JetStreamContext]]:
    """Run a NATS with the streams of the mesh, which syncs every message; yields its URL and a way in."""
    directory.mkdir(mode=0o711)  # noqa: ASYNC240 - nothing else runs yet
    server = EmbeddedNats(directory / "nats")
    url = server.start()
    try:
        connection = await nats.connect(url)
        js = connection.jetstream(publish_async_max_pending=_PIPELINED)
        for stream in default_streams(MESH):
            await ensure_stream(js, stream)
        yield url, js
        await connection.close()
    finally:
        server.stop()


@asynccontextmanager
async def _database(directory: Path) -> AsyncIterator[str]:
    """Run a Postgres (fsync on) with the tables of delivering; yields its URL."""
    server = EmbeddedPostgres(directory / "postgres")
    url = server.start()
    try:
        await migrate(url, ROOM)
        yield url
    finally:
        server.stop()


@contextmanager
def _worker(directory: Path, nats_url: str, database: str) -> Iterator[None]:
    """Run a worker, ready and with nothing to do."""
    port = free_port()
    settings = {"NATS_URL": nats_url, "DATABASE_URL": database, "LISTEN_PORT": str(port), "LOG_LEVEL": "error"}
    environment = {f"POSTROOM_WORKER_{name}": value for name, value in settings.items()}
    with program(directory / "worker.log", "postroom.worker", "run", environment=environment):
        await_http(f"http://127.0.0.1:{port}/ready")
        yield


async def _publish(js: JetStreamContext) -> float:
    """Publish the events with nats-py, pipelined; return the seconds until the last acknowledgement."""
    began = time.perf_counter()
    for number in range(MESSAGES):
        await js.publish_async(_SUBJECT, _BODY, headers={"Nats-Msg-Id": f"bench-{number}"}, wait_stall=_PATIENCE)
    await js.publish_async_completed()
    return time.perf_counter() - began


async def _stored(js: JetStreamContext) -> int:
    return (await js.stream_info(_STREAM)).state.messages


async def _settled(js: JetStreamContext) -> int:
    """Return how many messages the agent's consumer has acknowledged."""
    try:
        floor = (await js.consumer_info(_STREAM, "quiet_consumer")).ack_floor
    except NotFoundError:  # not made yet
        return 0
    return 0 if floor is None else floor.stream_seq


async def until_count(count: Callable[[], Awaitable[int]], least: int) -> int:
    """Ask until `count` has reached `least`, and return it; raises `TimeoutError`."""
    async with asyncio.timeout(_PATIENCE):
        while (found := await count()) < least:  # noqa: ASYNC110 - another process counts
            await asyncio.sleep(_POLL_SECONDS)
    return found
