"""The systems that are compared from end to end, each with a sender in this process and a handler in another.

Ours posts each message to a handler behind HTTP; the peers handle within their worker. All have a message on disk
before they acknowledge it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import nats
from redis.asyncio import Redis

from bench.driver import order
from bench.mailroom import pid_of, running, stack
from bench.processes import Handled, free_port, program
from bench.receivers import NAME
from embedded import EmbeddedNats, EmbeddedRedis
from postroom import AsyncClient

SEES_PEERS: Final = {"PYTHONPATH": str(Path(sys.prefix) / "peers")}  # for their programs alone; `make bench` fills it
_READY_SECONDS: Final = 60.0


class Missing(Exception):
    """A peer that this machine does not have; the sentence says what it lacks."""


class System(NamedTuple):
    """A running system."""

    send: Callable[[int], Awaitable[object]]
    handled: Handled
    parts: dict[str, int]  # pids; the sender is this process
    blocking: Callable[[int], object] | None = None  # where its client blocks: the same without an event loop


@asynccontextmanager
async def postroom(directory: Path) -> AsyncIterator[System]:
    """Run ours, from `AsyncClient.send` to a handler behind HTTP."""
    async with stack(directory) as found, AsyncClient(found.daemon.socket) as client:

        async def send(number: int) -> object:
            return await client.send("topic:orders", order(number), client_message_id=f"number-{number:012d}")

        yield System(send, found.handled, {"sender": os.getpid(), **found.parts})


@asynccontextmanager
async def jetstream(directory: Path) -> AsyncIterator[System]:
    """Run NATS JetStream with `sync_interval: always`; nats-py on both sides, a pull consumer."""
    directory.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    server, handled = EmbeddedNats(directory / "nats"), Handled(directory)
    with running(server) as url:
        connection = await nats.connect(url)
        stream = connection.jetstream()
        await stream.add_stream(name=NAME, subjects=[NAME])

        async def send(number: int) -> object:
            return await stream.publish(NAME, order(number).encode())

        with _receiver(directory, "jetstream", url, handled) as receiver:
            yield System(send, handled, {"sender": os.getpid(), "NATS": pid_of(server), "receiver": receiver})
        await connection.close()


@asynccontextmanager
async def redis(directory: Path) -> AsyncIterator[System]:
    """Run a Redis stream with `appendfsync always`; redis-py on both sides, a group that acknowledges each message."""
    directory.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    server, handled = DurableRedis(directory / "redis"), Handled(directory)
    with running(server) as url:
        client = Redis.from_url(url)
        await client.xgroup_create(NAME, NAME, mkstream=True)

        async def send(number: int) -> object:
            return await client.xadd(NAME, {"body": order(number)})

        with _receiver(directory, "redis", url, handled) as receiver:
            yield System(send, handled, {"sender": os.getpid(), "Redis": pid_of(server), "receiver": receiver})
        await client.aclose()


@asynccontextmanager
async def rabbitmq(directory: Path) -> AsyncIterator[System]:
    """Run a RabbitMQ quorum queue; aio-pika on both sides, publisher confirms, an acknowledgement for each message."""
    if shutil.which("rabbitmq-server") is None:
        raise Missing("RabbitMQ: this machine has no rabbitmq-server")
    if os.geteuid() == 0:
        raise Missing("RabbitMQ: its script changes user where root starts it: run this as another user")
    need("aio_pika")
    import aio_pika  # noqa: PLC0415 - installed by `make bench` alone

    directory.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    handled = Handled(directory)
    with _rabbitmq_server(directory) as (url, server):
        connection = await _connected(lambda: aio_pika.connect(url))
        channel = await connection.channel(publisher_confirms=True)
        await channel.declare_queue(NAME, durable=True, arguments={"x-queue-type": "quorum"})

        async def send(number: int) -> object:
            message = aio_pika.Message(order(number).encode(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
            return await channel.default_exchange.publish(message, NAME)

        with _receiver(directory, "rabbitmq", url, handled) as receiver:
            yield System(send, handled, {"sender": os.getpid(), "RabbitMQ": server, "receiver": receiver})
        await connection.close()


@asynccontextmanager
async def dramatiq(directory: Path) -> AsyncIterator[System]:
    """Run dramatiq on Redis with `appendfsync always`; its worker has as many processes and threads as by default."""
    need("dramatiq")
    from dramatiq import Message  # noqa: PLC0415 - installed by `make bench` alone
    from dramatiq.brokers.redis import RedisBroker  # noqa: PLC0415

    directory.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    server, handled = DurableRedis(directory / "redis"), Handled(directory)
    with running(server) as url:
        broker = RedisBroker(url=url)
        broker.declare_queue("default")

        def send(number: int) -> object:
            message = Message(queue_name="default", actor_name="handle", args=(order(number),), kwargs={}, options={})
            return broker.enqueue(message)

        environment = {**SEES_PEERS, "BENCH_URL": url, "BENCH_FILE": str(handled.file)}
        words = ["dramatiq", "bench.receivers:dramatiq"]
        with program(directory / "worker.log", *words, environment=environment) as worker:
            parts = {"sender": os.getpid(), "Redis": pid_of(server), "worker": worker.pid}
            yield System(lambda number: asyncio.to_thread(send, number), handled, parts, send)
        broker.close()


SYSTEMS: Final[dict[str, Callable[[Path], AbstractAsyncContextManager[System]]]] = {
    "Postroom": postroom,
    "JetStream": jetstream,
    "Redis stream": redis,
    "RabbitMQ": rabbitmq,
    "dramatiq": dramatiq,
}


class DurableRedis(EmbeddedRedis):
    """A Redis or Valkey that has every command on disk before it answers, and forgets nothing."""

    def _prepare(self) -> None:
        super()._prepare()
        with (self.directory / "redis.conf").open("a", encoding="utf-8") as config:
            config.write("appendonly yes\nappendfsync always\nmaxmemory 0\n")


def need(package: str) -> None:
    """Make a peer's library known to this process; raises `Missing` where it is not installed."""
    if SEES_PEERS["PYTHONPATH"] not in sys.path:
        sys.path.append(SEES_PEERS["PYTHONPATH"])  # behind everything of ours
    if find_spec(package) is None:
        raise Missing(f"{package.replace('_', '-')} is not installed: `make bench` does that")


@contextmanager
def _receiver(directory: Path, name: str, url: str, handled: Handled) -> Iterator[int]:
    words = ["bench.receivers", name, url, str(handled.file)]
    with program(directory / "receiver.log", *words, environment=SEES_PEERS) as process:
        yield process.pid


@contextmanager
def _rabbitmq_server(directory: Path) -> Iterator[tuple[str, int]]:
    port = free_port()
    environment = {
        "RABBITMQ_NODENAME": f"bench-{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
        "RABBITMQ_LOG_BASE": str(directory / "log"),
        "HOME": str(directory),
    }
    log = directory / "rabbitmq.log"
    with program(log, "rabbitmq-server", environment=environment, interpreter=()) as process:
        yield f"amqp://guest:guest@127.0.0.1:{port}/", process.pid


async def _connected(connect: Callable[[], Awaitable[Any]]) -> Any:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            return await connect()
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)
