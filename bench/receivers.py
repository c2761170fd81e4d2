"""The receiving side of the peers: `python -m bench.receivers NAME URL FILE`, a process of its own, as our consumer is.

Each takes messages as its library's documentation shows, writes down which came when, and acknowledges each by itself.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import nats
import uvloop
from aiohttp import ClientSession
from redis.asyncio import Redis

from bench.handler import Notebook

NAME: Final = "bench"  # of every stream, subject, queue, group and consumer
FETCHED: Final = 64  # messages at once


async def jetstream(url: str, notebook: Notebook) -> None:
    """Take messages from a durable pull consumer."""
    connection = await nats.connect(url)
    subscription = await connection.jetstream().pull_subscribe(NAME, durable=NAME, stream=NAME)
    while True:
        for message in await _fetch(subscription):
            notebook.note(message.data)
            await message.ack()


async def _fetch(subscription: Any) -> list[Any]:
    try:
        return list(await subscription.fetch(FETCHED, timeout=5))
    except nats.errors.TimeoutError:
        return []


async def redis(url: str, notebook: Notebook) -> None:
    """Take messages of a stream as a consumer of a group."""
    client = Redis.from_url(url)
    while True:
        read: Any = await client.xreadgroup(NAME, NAME, {NAME: ">"}, count=FETCHED, block=1000)
        for _, entries in read:
            for entry, fields in entries:
                notebook.note(fields[b"body"])
                await client.xack(NAME, NAME, entry)


async def rabbitmq(url: str, notebook: Notebook) -> None:
    """Take messages from a quorum queue."""
    import aio_pika  # noqa: PLC0415 - installed by `make bench` alone

    channel = await (await aio_pika.connect(url)).channel()
    await channel.set_qos(prefetch_count=FETCHED)
    queue = await channel.declare_queue(NAME, durable=True, arguments={"x-queue-type": "quorum"})
    async with queue.iterator() as messages:
        async for message in messages:
            notebook.note(message.body)
            await message.ack()


async def poster(url: str, target: str) -> None:
    """Take a stream's events from a pull consumer and post each to `target`: a consumer that does nothing else."""
    connection = await nats.connect(url)
    subscription = await connection.jetstream().pull_subscribe("", durable="poster", stream=os.environ["BENCH_STREAM"])
    async with ClientSession() as session:

        async def post(message: Any) -> None:
            async with session.post(target, data=message.data) as answer:
                answer.raise_for_status()
            await message.ack()

        while True:
            await asyncio.gather(*map(post, await _fetch(subscription)))


def dramatiq() -> None:
    """Set up dramatiq for a worker: `python -m dramatiq bench.receivers:dramatiq`."""
    from dramatiq import actor, set_broker  # noqa: PLC0415 - installed by `make bench` alone
    from dramatiq.brokers.redis import RedisBroker  # noqa: PLC0415

    notebook = Notebook(Path(os.environ["BENCH_FILE"]))

    def handle(body: str) -> None:
        notebook.note(body.encode())

    set_broker(RedisBroker(url=os.environ["BENCH_URL"]))
    actor(handle)


RECEIVERS: Final[Mapping[str, Callable[[str, Notebook], Awaitable[None]]]] = {
    "jetstream": jetstream,
    "redis": redis,
    "rabbitmq": rabbitmq,
}


async def _main() -> None:
    name, url, where = sys.argv[1:]
    await (poster(url, where) if name == "poster" else RECEIVERS[name](url, Notebook(Path(where))))


if __name__ == "__main__":
    uvloop.run(_main())
