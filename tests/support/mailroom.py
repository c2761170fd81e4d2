"""A whole mail room for a test: brokers and a daemon as processes of their own, on the session's Postgres and Redis.

Each process can be killed and started again at any moment; what they keep is in the database and the state directory.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from embedded.processes import tethered
from postroom import AsyncClient, BrokerClient, PostroomError
from support.zygote import Forked, Zygote, shared

MESH = "demo"
MEMBER = "alice"
TOPIC = "topic:orders"


class Process:
    """One program under `python -m`, with its settings in the environment; one of a `zygote` is forked from it."""

    def __init__(
        self,
        directory: Path,
        module: str,
        settings: dict[str, object],
        *arguments: str,
        zygote: Zygote | None = None,
    ) -> None:
        self._log = directory / f"{module}.log"
        self._command = [sys.executable, "-m", module, *arguments]
        self.settings = {name: str(value) for name, value in settings.items()}
        self._zygote = zygote
        self._running: subprocess.Popen[bytes] | Forked | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            if self._zygote is not None:
                self._running = self._zygote.start(self._command[1:], self._environment(), log)
                return
            self._running = subprocess.Popen(tethered(self._command), stdout=log, stderr=log, env=self._environment())

    async def run(self, *arguments: str) -> None:
        """Run it once with `arguments`, to its end."""
        with self._log.open("ab") as log:
            command = tethered([*self._command, *arguments])
            program = await asyncio.create_subprocess_exec(*command, stdout=log, env=self._environment())
        assert await program.wait() == 0, self.log()

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would."""
        assert self._running is not None
        self._running.kill()
        self._running.wait()

    def stop(self) -> int:
        """End it with SIGTERM and return its exit code."""
        assert self._running is not None
        self._running.terminate()
        return self._running.wait()

    def become(self, module: str, *arguments: str) -> None:
        """Be another program under the same settings from its next start on."""
        self._command = [sys.executable, "-m", module, *arguments]

    def settle(self, settings: dict[str, object]) -> None:
        """Change settings for its next start."""
        self.settings |= {name: str(value) for name, value in settings.items()}

    @property
    def running(self) -> bool:
        return self._running is not None and self._running.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._running is None else self._running.poll()

    @property
    def pid(self) -> int:
        assert self._running is not None
        return self._running.pid

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.settings}


class Mailroom:
    """A mesh with its member, topic and daemon; `await open()` before use, `close()` after."""

    def __init__(
        self, directory: Path, database_url: str, redis_url: str, *, brokers: int = 1, zygote: Zygote | None = None
    ) -> None:
        self.directory = directory
        self._zygote = zygote
        self.database_url = database_url
        self.socket = directory / "d.sock"
        self.state = directory / "state"
        self.admin_token = secrets.token_urlsafe(32)
        self._secret("admin.token", self.admin_token)
        self.broker_urls = [f"http://127.0.0.1:{_free_port()}" for _ in range(brokers)]
        self.brokers = [self._broker(url, database_url, redis_url) for url in self.broker_urls]
        self.daemon = Process(
            directory,
            "daemon",
            {
                "POSTROOM_DAEMON_MESH": MESH,
                "POSTROOM_DAEMON_SOCKET_PATH": self.socket,
                "POSTROOM_DAEMON_STATE_DIRECTORY": self.state,
                "POSTROOM_DAEMON_BROKER_URL": self.broker_urls[0],
                "POSTROOM_DAEMON_BROKER_TOKEN_FILE": directory / "alice.token",
                "POSTROOM_DAEMON_RELAY_BACKOFF_MOST_SECONDS": 1,
            },
            zygote=zygote,
        )

    async def open(self) -> None:
        await self.brokers[0].run("migrate")
        for broker, url in zip(self.brokers, self.broker_urls, strict=True):
            broker.start()
            await answering(url, broker)
        async with BrokerClient(self.broker_urls[0], self.admin_token) as administrator:
            await administrator.create_mesh(MESH)
            self.token = (await administrator.create_member(MESH, MEMBER)).token
            await administrator.create_topic(MESH, "orders")
            await administrator.subscribe(MESH, "orders", MEMBER)
        self._secret("alice.token", self.token)
        self.daemon.start()
        await self.daemon_ready()

    async def daemon_ready(self) -> None:
        """Return when the daemon accepts; fails with its log when it ended instead."""
        async with AsyncClient(self.socket, patience=60) as client:
            while self.daemon.exit_code is None:
                try:
                    if (await client.ready()).ready:
                        return
                except Exception:  # noqa: BLE001 - whatever it is, the exit code and the log tell more
                    await asyncio.sleep(0.01)
        raise AssertionError(self.daemon.log())

    def close(self) -> None:
        for process in (self.daemon, *self.brokers):
            if process.exit_code is None and process._running is not None:
                process.stop()

    def _broker(self, url: str, database_url: str, redis_url: str) -> Process:
        place = self.directory / url.rsplit(":", 1)[1]
        place.mkdir()
        settings = {
            "POSTROOM_BROKER_DATABASE_URL": database_url,
            "POSTROOM_BROKER_REDIS_URL": redis_url,
            "POSTROOM_BROKER_ADMIN_TOKEN_FILE": self.directory / "admin.token",
            "POSTROOM_BROKER_LISTEN_PORT": place.name,
        }
        return Process(place, "broker", settings, zygote=self._zygote)

    def _secret(self, name: str, text: str) -> None:
        file = self.directory / name
        file.touch(mode=0o600)
        file.write_text(text)


async def answering(url: str, process: Process) -> None:
    """Return when the broker at `url` is healthy; fails with its log when it ended instead."""
    async with aiohttp.ClientSession() as session:
        while process.exit_code is None:
            try:
                async with session.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.05)
    raise AssertionError(process.log())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class LoneDaemon:
    """`python -m daemon` over a directory; started, killed and started again."""

    def __init__(self, directory: Path, *, zygote: Zygote | None = None, **settings: object) -> None:
        self.socket = directory / "d.sock"
        self.state = directory / "state"
        token = directory / "member.token"
        token.touch(mode=0o600)
        token.write_text("a-token-that-nobody-checks")
        self.environment = {
            "POSTROOM_DAEMON_MESH": "demo",
            "POSTROOM_DAEMON_SOCKET_PATH": str(self.socket),
            "POSTROOM_DAEMON_STATE_DIRECTORY": str(self.state),
            "POSTROOM_DAEMON_BROKER_URL": "http://127.0.0.1:9",
            "POSTROOM_DAEMON_BROKER_TOKEN_FILE": str(token),
            **{f"POSTROOM_DAEMON_{name}": str(value) for name, value in settings.items()},
        }
        self.process = Process(directory, "daemon", self.environment, zygote=zygote)

    async def start(self) -> None:
        """Start it and return when it accepts."""
        self.process.start()
        async with AsyncClient(self.socket, patience=0) as client:
            while self.process.exit_code is None:
                try:
                    await client.ready()
                except PostroomError:
                    await asyncio.sleep(0.02)
                else:
                    return
        raise AssertionError(self.process.log())

    async def restart(self) -> None:
        """Kill it as a crash would, and start it again."""
        self.process.kill()
        await self.start()

    def stop(self) -> None:
        """Stop it, if it runs."""
        if self.process.exit_code is None:
            self.process.stop()


@contextmanager
def worker(*arguments: str, ready: str = "publishing", **environment: str) -> Iterator[tuple[Forked, dict[str, Any]]]:
    """Run a worker, and yield it with the log line that says that it is `ready`."""
    words = ["-m", "postroom.worker", "run", *arguments]
    environment = {"PATH": os.environ["PATH"], "POSTROOM_WORKER_LISTEN_PORT": "0", **environment}
    reading, writing = os.pipe()
    with open(reading, "rb") as said, ThreadPoolExecutor(1) as readers:  # noqa: PTH123 - a descriptor
        with open(writing, "wb") as output:  # noqa: PTH123 - the same
            process = shared().start(words, environment, output)
        try:
            started: dict[str, Any] = {}
            while started.get("event") != ready:
                line = said.readline()
                assert line, "the worker ended"
                started = json.loads(line)
            readers.submit(said.read)  # users' code that prints where nobody reads stands still
            yield process, started
        finally:
            process.kill()
            process.wait()
