"""Delivering a backlog, part by part: the publisher beside nats-py, a consumer beside a bare one, an agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import asyncpg
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from bench.driver import Void, order
from bench.mailroom import MESH, consumer, running, streams, worker
from bench.processes import Handled, Meter, handler, program
from bench.report import Measure, Results
from embedded import EmbeddedPostgres
from postroom._wire.sql import load_queries
from postroom.chassis.postgres import migrate
from postroom.delivery import ROOM
from postroom.delivery.subjects import event_subject, stream_name

_PUBLISHED: Final = 20_000
_CONSUMED: Final = 6_000
_AGGREGATES: Final = 100
_STREAM: Final = stream_name(MESH, "events")
_SUBJECT: Final = event_subject(MESH, "placed", 1)
_QUERIES: Final = load_queries("bench", "events.sql")
_POLL_SECONDS: Final = 0.02
_PATIENCE: Final = 120.0  # seconds


async def publish(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Let a worker publish events out of Postgres, and nats-py the same ones into the same stream, pipelined."""
    count = round(_PUBLISHED * scale)
    async with streams(place / "nats") as (url, js), _database(place) as database:
        theirs = await _fill(js, count)
        servers = {"POSTROOM_NATS_URL": url, "POSTROOM_DATABASE_URL": database}
        connection = await asyncpg.connect(database)
        with worker(place, servers):
            await connection.execute(_QUERIES["emit"], MESH, _AGGREGATES, order(), count)
            began = time.perf_counter()
            await _until_count(lambda: _stored(js), 2 * count)
            ours = time.perf_counter() - began
        await connection.close()
    yield Measure("events of a worker", count / ours, "/s")
    yield Measure("of nats-py, pipelined", theirs / ours, "x")


async def consume(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Let a consumer post a stream's events to a handler that does nothing, and then a bare nats-py consumer."""
    count = round(_CONSUMED * scale)
    async with streams(place / "nats") as (url, js), _database(place) as database:
        await _fill(js, count)
        servers = {"POSTROOM_NATS_URL": url, "POSTROOM_DATABASE_URL": database}
        with (
            handler(place, ours := Handled(place, "ours")) as (target, pid),
            consumer(place, servers, target) as reader,
        ):
            rate, cpu = await _drained(ours, count, {"consumer": reader, "handler": pid})
        with handler(place, theirs := Handled(place, "theirs")) as (target, pid):
            words = ["bench.receivers", "poster", url, target]
            with program(place / "poster.log", *words, environment={"BENCH_STREAM": _STREAM}) as process:
                bare, bare_cpu = await _drained(theirs, count, {"consumer": process.pid, "handler": pid})
    yield Measure("a consumer with a trivial HTTP handler", rate, "/s")
    yield Measure("a bare nats-py consumer that posts", bare, "/s")
    yield Measure("of the bare consumer", rate / bare, "x")
    yield Measure("CPU of the consumer per message", cpu, "µs")
    yield Measure("CPU of the bare consumer per message", bare_cpu, "µs")


async def agent(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Let an agent whose `receive` does nothing handle a stream's events."""
    count = round(_PUBLISHED * scale)
    async with streams(place / "nats") as (url, js):
        await _fill(js, count)
        environment = {"POSTROOM_NATS_URL": url, "POSTROOM_AGENT_STATE_DIRECTORY": str(place / "agent")}
        words = ["agent", "run", "bench.quiet:Quiet", "--tenant", MESH]
        with program(place / "agent.log", "cli", *words, environment=environment):
            rate = await rate_of(lambda: _settled(js), count)
    yield Measure("an agent whose `receive` does nothing", rate, "/s")


async def rate_of(count: Callable[[], Awaitable[int]], least: int) -> float:
    """Return how many are done a second, from when the first of them is; raises `Void`."""
    before, began = await _until_count(count, 1), time.perf_counter()
    if before >= least:
        raise Void(f"all {least:,} were done before the first look")
    return (await _until_count(count, least) - before) / (time.perf_counter() - began)


async def _until_count(count: Callable[[], Awaitable[int]], least: int) -> int:
    """Ask until `count` has reached `least`, and return it; raises `Void`."""
    found = 0
    try:
        async with asyncio.timeout(_PATIENCE):
            while (found := await count()) < least:  # noqa: ASYNC110 - another process counts
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise Void(f"of {least:,} only {found:,} were done within {_PATIENCE:g} s") from None
    return found


@asynccontextmanager
async def _database(place: Path) -> AsyncIterator[str]:
    """Run a Postgres (fsync on) with the tables of delivering; yields its URL."""
    with running(EmbeddedPostgres(place / "postgres")) as url:
        await migrate(url, ROOM)
        yield url


async def _drained(handled: Handled, count: int, parts: dict[str, int]) -> tuple[float, float]:
    """Wait until all have come; messages a second from first to last, and the consumer's CPU for each, in µs."""
    await handled.until(1)
    meter, first = Meter(parts), handled.look()
    before = meter.cpu()
    await handled.until(count)
    cpu = meter.cpu()["consumer"] - before["consumer"]
    times = sorted(handled.at.values())
    return (count - 1) / (times[-1] - times[0]), cpu / (count - first) * 1e6


async def _fill(js: JetStreamContext, count: int) -> float:
    """Publish so many events with nats-py, pipelined; return the seconds until the last acknowledgement."""
    bodies = [order(number).encode() for number in range(count)]
    began = time.perf_counter()
    for number, body in enumerate(bodies):
        await js.publish_async(_SUBJECT, body, headers={"Nats-Msg-Id": f"bench-{number}"}, wait_stall=_PATIENCE)
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
