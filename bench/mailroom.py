"""Brokers on durable embedded servers, with a mesh, a member and a topic that it reads; and all that is around them."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import nats
from nats.js import JetStreamContext

from bench.processes import Daemon, Handled, await_http, daemon, free_port, handler, output_of, program
from embedded import EmbeddedNats, EmbeddedPostgres, EmbeddedRedis
from embedded.server import EmbeddedServer
from postroom import BrokerClient
from postroom.delivery.streams import default_streams, ensure_stream

MESH: Final = "demo"
PIPELINED: Final = 1000  # publishes under way at once


class Broker(NamedTuple):
    """Brokers of one mesh, and whose tokens open them: a member's, the administrator's."""

    urls: list[str]
    token: str
    admin: str
    database_url: str
    parts: dict[str, int]  # pids

    @property
    def url(self) -> str:
        """The first broker."""
        return self.urls[0]


class Stack(NamedTuple):
    """Everything from a daemon to a handler; `parts` has the pid of each."""

    daemon: Daemon
    handled: Handled
    parts: dict[str, int]


@asynccontextmanager
async def broker(
    directory: Path,
    *,
    brokers: int = 1,
    database: type[EmbeddedPostgres] = EmbeddedPostgres,
    nats_url: str | None = None,
) -> AsyncIterator[Broker]:
    """Run Postgres (fsync on), Redis and brokers whose limiter never refuses, while the block lasts.

    They know a NATS at `nats_url`, for what operators ask.
    """
    directory.mkdir(mode=0o711)  # noqa: ASYNC240 - nothing else runs yet
    postgres, redis = database(directory / "postgres"), EmbeddedRedis(directory / "redis")
    admin = secrets.token_urlsafe(32)
    (directory / "admin.token").touch(mode=0o600)
    (directory / "admin.token").write_text(admin)
    async with AsyncExitStack() as stack:
        settings = {
            "DATABASE_URL": stack.enter_context(running(postgres)),
            "REDIS_URL": stack.enter_context(running(redis)),
            "ADMIN_TOKEN_FILE": str(directory / "admin.token"),
            "LIMITER_PER_MESH": "1000000000",
            "LIMITER_PER_MEMBER": "1000000000",
            "LOG_LEVEL": "error",
            **({} if nats_url is None else {"NATS_URL": nats_url}),
        }
        environment = {f"POSTROOM_BROKER_{name}": value for name, value in settings.items()}
        output_of(["broker", "migrate"], environment)
        parts, urls = {"Postgres": pid_of(postgres), "Redis": pid_of(redis)}, []
        for number in range(brokers):
            port = str(free_port())
            page = {**environment, "POSTROOM_BROKER_LISTEN_PORT": port}
            process = stack.enter_context(program(directory / f"broker-{number}.log", "broker", environment=page))
            await_http(f"http://127.0.0.1:{port}/health")
            parts["broker" if number == 0 else f"broker {number + 1}"] = process.pid
            urls.append(f"http://127.0.0.1:{port}")
        async with BrokerClient(urls[0], admin) as administrator:
            await administrator.create_mesh(MESH)
            token = (await administrator.create_member(MESH, "alice")).token
            await administrator.create_topic(MESH, "orders")
            await administrator.subscribe(MESH, "orders", "alice")
        yield Broker(urls, token, admin, settings["DATABASE_URL"], parts)


@asynccontextmanager
async def stack(directory: Path) -> AsyncIterator[Stack]:
    """Run all programs and servers that a message meets, and a handler that does nothing."""
    directory.mkdir(mode=0o711)  # noqa: ASYNC240 - nothing else runs yet
    server, handled = EmbeddedNats(directory / "nats"), Handled(directory)
    async with AsyncExitStack() as within:
        servers = {"POSTROOM_NATS_URL": within.enter_context(running(server))}
        found = await within.enter_async_context(broker(directory / "broker"))
        servers["POSTROOM_DATABASE_URL"] = found.database_url
        url, handler_pid = within.enter_context(handler(directory, handled))
        worker_pid = within.enter_context(worker(directory, servers))
        consumer_pid = within.enter_context(consumer(directory, servers, url))
        sender = within.enter_context(daemon(directory / "daemon", broker=found.url, token=found.token))
        parts = {"daemon": sender.pid, **found.parts, "NATS": pid_of(server)}
        yield Stack(sender, handled, parts | {"worker": worker_pid, "consumer": consumer_pid, "handler": handler_pid})


@contextmanager
def worker(directory: Path, servers: dict[str, str], **settings: str) -> Iterator[int]:
    """Run a worker, ready and with nothing to do; yields its pid."""
    port = str(free_port())
    settings = {"LISTEN_PORT": port, "LOG_LEVEL": "error", **settings}
    environment = servers | {f"POSTROOM_WORKER_{name}": value for name, value in settings.items()}
    with program(directory / "worker.log", "postroom.worker", "run", environment=environment) as process:
        await_http(f"http://127.0.0.1:{port}/ready")
        yield process.pid


@contextmanager
def consumer(directory: Path, servers: dict[str, str], url: str) -> Iterator[int]:
    """Run a consumer that posts the mesh's events to `url`; yields its pid."""
    words = ["consumer", "run", "--context", MESH, "--name", "bench", "--handler", url]
    with program(directory / "consumer.log", "cli", *words, environment=servers) as process:
        yield process.pid


@asynccontextmanager
async def streams(directory: Path) -> AsyncIterator[tuple[str, JetStreamContext]]:
    """Run a NATS with the streams of the mesh, which syncs every message; yields its URL and a way in."""
    directory.mkdir(mode=0o711)  # noqa: ASYNC240 - nothing else runs yet
    with running(EmbeddedNats(directory / "nats")) as url:
        connection = await nats.connect(url)
        js = connection.jetstream(publish_async_max_pending=PIPELINED)
        for stream in default_streams(MESH):
            await ensure_stream(js, stream)
        yield url, js
        await connection.close()


@contextmanager
def running(server: EmbeddedServer) -> Iterator[str]:
    """Run a server while the block lasts; yields its URL."""
    try:
        yield server.start()
    finally:
        server.stop()


def pid_of(server: EmbeddedServer) -> int:
    """Return the pid of a server that runs."""
    process = server.process
    assert process is not None  # noqa: S101 - it was just started
    return process.pid
