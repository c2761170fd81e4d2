"""A broker on durable embedded servers, with a mesh, a member and a topic that one member reads."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bench.processes import await_http, free_port, output_of, program
from embedded import EmbeddedPostgres, EmbeddedRedis
from postroom import BrokerClient

MESH: Final = "demo"


class Broker(NamedTuple):
    """A running broker and whose token opens it."""

    url: str
    token: str
    database_url: str


@asynccontextmanager
async def broker(directory: Path) -> AsyncIterator[Broker]:
    """Run Postgres (fsync on), Redis and a broker whose limiter never refuses, while the block lasts."""
    directory.mkdir(mode=0o711)  # noqa: ASYNC240 - nothing else runs yet
    postgres, redis = EmbeddedPostgres(directory / "postgres"), EmbeddedRedis(directory / "redis")
    port = free_port()
    admin = secrets.token_urlsafe(32)
    (directory / "admin.token").touch(mode=0o600)
    (directory / "admin.token").write_text(admin)
    async with AsyncExitStack() as stack:
        settings = {"DATABASE_URL": postgres.start()}
        stack.callback(postgres.stop)
        settings["REDIS_URL"] = redis.start()
        stack.callback(redis.stop)
        settings |= {
            "ADMIN_TOKEN_FILE": str(directory / "admin.token"),
            "LISTEN_PORT": str(port),
            "LIMITER_PER_MESH": "1000000000",
            "LIMITER_PER_MEMBER": "1000000000",
            "LOG_LEVEL": "error",
        }
        environment = {f"POSTROOM_BROKER_{name}": value for name, value in settings.items()}
        output_of(["broker", "migrate"], environment)
        stack.enter_context(program(directory / "broker.log", "broker", environment=environment))
        await_http(f"http://127.0.0.1:{port}/health")
        async with BrokerClient(f"http://127.0.0.1:{port}", admin) as administrator:
            await administrator.create_mesh(MESH)
            token = (await administrator.create_member(MESH, "alice")).token
            await administrator.create_topic(MESH, "orders")
            await administrator.subscribe(MESH, "orders", "alice")
        yield Broker(f"http://127.0.0.1:{port}", token, settings["DATABASE_URL"])
