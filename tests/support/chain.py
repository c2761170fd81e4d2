"""The whole chain for a test: daemon → broker → worker → JetStream → consumer, agent and another daemon's inbox.

Each is a process of its own that may be killed at any moment, NATS too; what they keep is in the database and in files.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import nats
from nats.errors import Error

from embedded import EmbeddedNats
from postroom import AsyncClient, BrokerClient
from support.mailroom import MESH, Mailroom, Process
from support.nats_users import Grants, NatsWithUsers
from support.zygote import Zygote

EXAMPLES = Path(__file__).parents[2] / "examples"
QUEUE = "queue:counter"  # whose commands the agent of `examples/counting_agent.py` takes
READER = "bob"
_QUICK = {"NATS_RECONNECT_SECONDS": 0.1, "NATS_PING_SECONDS": 1, "NATS_CONNECT_SECONDS": 1}
_RETRIES = {"FIRST_SECONDS": 0.1, "MOST_SECONDS": 1}


class Chain:
    """A mail room with all that comes behind it; `await open()` before use, `close()` after."""

    def __init__(
        self,
        directory: Path,
        database_url: str,
        redis_url: str,
        handler_url: str,
        *,
        brokers: int = 1,
        zygote: Zygote | None = None,
        grants: Grants | None = None,
    ) -> None:
        """With `grants` each program, and the broker, logs in to NATS as the user of its name."""
        self.directory = directory
        self._zygote = zygote
        self.room = Mailroom(directory, database_url, redis_url, brokers=brokers, zygote=zygote)
        self.nats = EmbeddedNats(directory / "nats") if grants is None else NatsWithUsers(directory / "nats", grants)
        self._database_url = database_url
        self._handler_url = handler_url
        self.agent_state = directory / "counter"
        self.reader_state = directory / "bob"
        self.reader_socket = directory / "b.sock"
        self.programs: dict[str, Process] = {}

    async def open(self, *, worker: dict[str, object] | None = None, consumer: dict[str, object] | None = None) -> None:
        """Start everything; `worker` and `consumer` are further settings of those two."""
        self.nats.start()
        if isinstance(self.nats, NatsWithUsers):
            for broker in self.room.brokers:
                broker.settle({"POSTROOM_BROKER_NATS_URL": self._url("broker")})
        await self.room.open()
        async with BrokerClient(self.room.broker_urls[0], self.room.admin_token) as administrator:
            self.room._secret("bob.token", (await administrator.create_member(MESH, READER)).token)
            await administrator.subscribe(MESH, "orders", READER)
            await administrator.create_queue(MESH, QUEUE.removeprefix("queue:"))
        self.programs = {
            "worker": self.worker(self._url("worker"), worker or {}),
            "consumer": self.consumer(self._url("consumer"), consumer or {}),
            "agent": self.agent(self._url("agent")),
            "reader": self._reader(self._url("daemon")),
        }
        for program in self.programs.values():
            program.start()

    def _url(self, program: str) -> str:
        return self.nats.url_of(program) if isinstance(self.nats, NatsWithUsers) else self.nats.url

    def close(self) -> None:
        for program in self.programs.values():
            if program.exit_code is None:
                program.kill()
        self.room.close()
        self.nats.stop()

    def restart(self, name: str) -> None:
        """Kill a program with -9 and start it again."""
        self.programs[name].kill()
        self.programs[name].start()

    def revive(self) -> None:
        """Start what has ended by itself, as a service manager does; raises where that was a wrong config."""
        for name, program in self.programs.items():
            if program.exit_code is not None:
                assert program.exit_code in (69, 75), f"{name}: {program.log()}"
                program.start()

    def kill_nats(self, *, forget: bool = False, restore: Path | None = None, copy: Path | None = None) -> None:
        """End NATS as a power cut does and start it again.

        It begins without what it had stored where it shall `forget`, and with what lies in `restore`; `copy` is where
        its store is copied to meanwhile.
        """
        self.end_nats()
        store = self.directory / "nats" / "jetstream"
        if copy is not None:
            shutil.copytree(store, copy)
        if forget or restore is not None:
            shutil.rmtree(store)
        if restore is not None:
            shutil.copytree(restore, store)
        self.nats.start()

    def end_nats(self) -> None:
        """End NATS as a power cut does; `nats.start` starts it again."""
        process = self.nats.process
        assert process is not None
        process.end((signal.SIGKILL, 10))
        self.nats.stop()

    async def pause_nats(self, until: Callable[[], Awaitable[None]]) -> None:
        """Stop NATS in its tracks until `until` returns."""
        process = self.nats.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            await until()
        finally:
            os.kill(process.pid, signal.SIGCONT)

    async def purge(self, kind: str) -> None:
        """Remove every message of the mesh's stream of `kind`, EVENTS or INBOX; nothing where it is not there."""
        connection = await nats.connect(self.nats.url)
        try:
            await connection.jetstream().purge_stream(f"{MESH.upper()}_{kind}")
        except Error:  # deleted, and not yet declared again
            return
        finally:
            await connection.close()

    def worker(self, nats_url: str, more: dict[str, object]) -> Process:
        """Return a worker, which is not started yet."""
        settings = {"DATABASE_URL": self._database_url, "NATS_URL": nats_url, "RECORD_CHECK_SECONDS": 0.5, **_QUICK}
        settings |= {f"{source}_{key}": value for source in ("EVENTS", "DELIVERIES") for key, value in _RETRIES.items()}
        variables = _variables("WORKER", settings | {"EVENTS_ACK_SECONDS": 1} | more)
        return Process(self.directory, "postroom.worker", variables, "run", zygote=self._zygote)

    def consumer(self, nats_url: str, more: dict[str, object]) -> Process:
        """Return a consumer, which is not started yet."""
        settings = {
            "CONTEXT": MESH,
            "DATABASE_URL": self._database_url,
            "NATS_URL": nats_url,
            "CONSUMER_STREAM": f"{MESH.upper()}_EVENTS",
            "CONSUMER_DURABLE": "counting",
            "CONSUMER_ACK_WAIT_SECONDS": 2,
            "HANDLER_URL": self._handler_url,
            "HANDLER_TIMEOUT_SECONDS": 1.5,
            **_QUICK,
            **{f"CONSUMER_BACKOFF_{key}": value for key, value in _RETRIES.items()},
            **more,
        }
        variables = _variables("CONSUMER", settings)
        return Process(self._place("consumer"), "postroom.worker", variables, "consumer", zygote=self._zygote)

    def agent(self, nats_url: str) -> Process:
        """Return an agent, which is not started yet; those of a chain share a store."""
        settings = {
            "TENANT": MESH,
            "NATS_URL": nats_url,
            "STATE_DIRECTORY": self.agent_state,
            "ACK_WAIT_SECONDS": 2,
            "MAX_DELIVER": 50,  # kills count as attempts, and there are many
            **_QUICK,
            **{f"BACKOFF_{key}": value for key, value in _RETRIES.items()},
        }
        variables = {"PYTHONPATH": EXAMPLES, **_variables("AGENT", settings)}
        words = ["agent", "counting_agent:Counter"]
        return Process(self._place("agent"), "postroom.worker", variables, *words, zygote=self._zygote)

    async def reader_ready(self) -> None:
        async with AsyncClient(self.reader_socket, patience=60) as client:
            await client.ready()

    def _reader(self, nats_url: str) -> Process:
        settings = {
            "MESH": MESH,
            "SOCKET_PATH": self.reader_socket,
            "STATE_DIRECTORY": self.reader_state,
            "BROKER_URL": self.room.broker_urls[0],
            "BROKER_TOKEN_FILE": self.directory / "bob.token",
            "NATS_URL": nats_url,
            **_QUICK,
        }
        return Process(self._place("reader"), "daemon", _variables("DAEMON", settings), zygote=self._zygote)

    def _place(self, name: str) -> Path:
        place = self.directory / f"{name}-log"
        place.mkdir(exist_ok=True)
        return place


def _variables(program: str, settings: dict[str, object]) -> dict[str, object]:
    return {f"POSTROOM_{program}_{key}": value for key, value in settings.items()}
