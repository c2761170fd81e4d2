"""Everything on this machine: the embedded servers, a broker, a worker and a daemon, below one state directory.

`up` starts a stack, `down` stops it, `status` shows it, `demo` exercises one. Here are its processes: their configs,
their commands, when they are ready, and the order in which they need each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from cli.stack.layout import MESH, SENDER, Layout
from embedded import EmbeddedError, EmbeddedNats, EmbeddedPostgres, EmbeddedRedis, EmbeddedServer, ProcessIdentity
from embedded.nats import is_free
from embedded.processes import tethered
from postroom import AsyncClient, Conflict, NotFound, PostroomError, TryAgain
from postroom._wire.connections import Pool, url_dial
from postroom._wire.transport import Peer, Transport
from postroom.broker import BrokerClient
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import replace_private

MEMBERS: Final = (SENDER, "bob")
TOPIC: Final = "orders"
QUEUE: Final = "work"
_PLAIN: Final = re.compile(r"[\w@%+=:,./?-]+")  # what a shell takes as it is in an assignment
_PORTS: Final = range(20_000, 32_768)  # below those that the kernel hands out, so that a port stays free for its owner
_TRIES: Final = 100
_WRITTEN: Final = "# `postroom up` writes this file at every start: what is changed here is lost then."
_PROBE_SECONDS: Final = 2.0
_BACKLOG: Final = re.compile(r'^postroom_worker_backlog_messages\{source="([^"]*)"\} (\S+)$', re.MULTILINE)


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the command line that runs one of our modules, whatever the working directory and `PYTHONPATH` hold.

    `python -m` alone looks there first, and `broker.py` or `cli/` are likely names in a user's project.
    """
    return [sys.executable, "-P", "-E", "-m", module, *map(str, arguments)]


class Program(EmbeddedServer):
    """A program of Postroom with a config file of its own, started as `python -m <module>`."""

    module: str
    arguments: tuple[str, ...] = ()

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack.layout.state / self.name)
        self.stack = stack
        self.layout = stack.layout
        self.config_file = self.directory / f"{self.name}.toml"  # written at every start (0600: it may hold secrets)

    def _prepare(self) -> None:
        replace_private(self.config_file, f"{_WRITTEN}\n{toml(self._settings())}\n")

    def _environment(self) -> dict[str, str]:
        """Return the environment of every server, with the variables of OpenTelemetry."""
        return super()._environment() | {name: text for name, text in os.environ.items() if name.startswith("OTEL_")}

    def _command(self) -> list[str]:
        return module_command(self.module, *self.arguments, "--config", self.config_file)

    def _ready(self, process: ProcessIdentity) -> bool:  # noqa: ARG002 - the address is this process's alone
        async def ask() -> bool:
            try:
                await asyncio.wait_for(self._probe(), _PROBE_SECONDS)
            except (PostroomError, TimeoutError):
                return False
            return True

        family, address = self._address()
        with socket.socket(family) as connection:  # a program that still starts is asked a hundred times
            connection.settimeout(_PROBE_SECONDS)
            listens = connection.connect_ex(address) == 0
        return listens and asyncio.run(ask())

    @abstractmethod
    def _address(self) -> tuple[socket.AddressFamily, Any]:
        """Return where it listens."""

    @abstractmethod
    def _settings(self) -> Mapping[str, Any]:
        """Return the config as the program's own types read it."""

    @abstractmethod
    def _probe(self) -> Awaitable[object]:
        """Ask the program something; raises `PostroomError` if it is not ready."""


class PageProgram(Program):
    """A program on a port of loopback, the same one at every start while that is free, with a page about its health."""

    @property
    def url(self) -> str:
        """Where a client connects."""
        return f"http://127.0.0.1:{self._kept_port()}"

    def _kept_port(self) -> int:
        try:
            found = re.search(r"^listen_port = (\d+)$", self.config_file.read_text("utf-8"), re.MULTILINE)
        except FileNotFoundError:
            found = None
        return int(found[1]) if found else choose_port()

    def _port(self) -> int:
        """Return the port for the next start."""
        port = self._kept_port()
        return port if is_free(port) else choose_port()

    def _address(self) -> tuple[socket.AddressFamily, Any]:
        return socket.AF_INET, ("127.0.0.1", self._kept_port())

    def _probe(self) -> Awaitable[object]:
        return self._page("/health")

    async def _page(self, path: str) -> str:
        """Return a page of its own; raises `PostroomError` where it does not serve it."""
        peer = Peer(self.name, self.url, f"see {self.log_file}")
        transport = Transport(Pool(url_dial(self.url, None)), self.url, peer, _PROBE_SECONDS)
        try:
            async with transport.open("GET", path, silence=_PROBE_SECONDS) as answer:
                page = bytearray()
                while piece := await answer.read(_PROBE_SECONDS):
                    page += piece
                return page.decode()
        finally:
            await transport.close()


class BrokerProgram(PageProgram):
    """The broker."""

    name = module = "broker"

    def client(self) -> BrokerClient:
        """Return a client that administers the broker."""
        return BrokerClient(self.url, self.layout.admin_token_file.read_text("utf-8").strip(), patience=0)

    def _settings(self) -> Mapping[str, Any]:
        redis = {} if self.stack.redis is None else {"redis_url": self.stack.redis.url}
        return redis | {
            "database_url": self.stack.postgres.url,
            "admin_token_file": self.layout.admin_token_file,
            "listen_host": "127.0.0.1",
            "listen_port": self._port(),
            "nats": {"url": self.stack.nats.url},
        }

    def _prepare(self) -> None:
        super()._prepare()
        migrate = module_command("broker", "migrate", "--config", self.config_file)
        with self.open_log() as log:
            done = subprocess.run(tethered(migrate), stdout=log, stderr=log, env={"PATH": os.defpath}, check=False)  # noqa: S603 - our own words, no shell
        if done.returncode != 0:
            raise EmbeddedError(f"the broker's database could not be migrated; see {self.log_file}")


class DaemonProgram(Program):
    """The daemon of the mesh, which acts as one member."""

    name = module = "daemon"

    @property
    def url(self) -> str:
        """Where a client connects: the socket."""
        return str(self.layout.socket)

    def client(self) -> AsyncClient:
        """Return a client that asks once."""
        return AsyncClient(self.layout.socket, patience=0)

    def _settings(self) -> Mapping[str, Any]:
        return {
            "mesh": MESH,
            "state_directory": self.layout.daemon_directory,
            "socket": {"path": self.layout.socket},
            "broker": {"url": self.stack.broker.url, "token_file": self.layout.token_file(SENDER)},
            "nats": {"url": self.stack.nats.url},
        }

    def _address(self) -> tuple[socket.AddressFamily, Any]:
        return socket.AF_UNIX, str(self.layout.socket)

    async def _probe(self) -> object:
        async with self.client() as client:
            return await client.version()  # one whose outbox is full is not ready, and has to be seen to


class WorkerProgram(PageProgram):
    """The worker, which publishes what the broker accepted."""

    name = "worker"
    module = "postroom.worker"
    arguments = ("run",)

    def _settings(self) -> Mapping[str, Any]:
        return {
            "database_url": self.stack.postgres.url,
            "listen_port": self._port(),
            "nats": {"url": self.stack.nats.url},
        }

    async def backlog(self) -> dict[str, int]:
        """Ask the worker how many messages wait to be published, by source; raises `PostroomError` if it cannot say."""
        found = _BACKLOG.findall(await self._page("/metrics"))
        if not found:  # Postgres did not answer the worker
            raise TryAgain.of("database_unavailable", "the worker cannot ask Postgres what is unpublished: try again")
        return {source: round(float(count)) for source, count in found}


def toml(settings: Mapping[str, Any]) -> str:
    """Write settings as TOML: scalars first, then one table for each mapping; a JSON scalar is a TOML one.

    A `$` in a path is doubled: each is the path of that name, whatever variables its reader has.
    """
    scalars = {
        name: str(value).replace("$", "$$") if isinstance(value, Path) else value
        for name, value in settings.items()
        if not isinstance(value, Mapping)
    }
    tables = {name: value for name, value in settings.items() if isinstance(value, Mapping)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in scalars.items()]
    return "\n".join([*lines, *(f"\n[{name}]\n{toml(table)}" for name, table in tables.items())])


def choose_port() -> int:
    """Return a free port of loopback."""
    for _ in range(_TRIES):
        port = secrets.choice(_PORTS)
        if is_free(port):
            return port
    raise EmbeddedError(f"no free port of loopback found between {_PORTS.start} and {_PORTS.stop}")


async def create_mesh(program: BrokerProgram, layout: Layout) -> None:
    """Create what is missing, at every start; raises `PostroomError` where the broker refuses.

    A member that was revoked stays so: its name is taken.
    """
    async with program.client() as broker:
        with suppress(Conflict):
            await broker.create_mesh(MESH)
        members = {member.name: member for member in await broker.list_members(MESH)}
        for name in MEMBERS:
            token_file, known = layout.token_file(name), members.get(name)
            if known is None:  # the mesh is new, also where it was deleted and its tokens are still here
                member = await broker.create_member(MESH, name)
            elif token_file.exists() or known.revoked_at is not None:
                continue
            else:  # a crash came between the member and its token
                member = await broker.rotate_member_token(MESH, name)
            replace_private(token_file, f"{member.token}\n")
        with suppress(Conflict):
            await broker.create_topic(MESH, TOPIC)
        with suppress(Conflict):
            await broker.create_queue(MESH, QUEUE)
        for name in MEMBERS:
            with suppress(Conflict, NotFound):
                await broker.subscribe(MESH, TOPIC, name)


class Stack:
    """The servers, the broker, the worker and the daemon below `state`; each can be stopped and started by itself.

    Raises `EmbeddedError` where a process does not start or stop. All of them end with the process that started them.
    """

    def __init__(self, state: Path) -> None:
        self.layout = Layout(state.absolute())
        self.postgres = EmbeddedPostgres(self.layout.state / "postgres")
        self.redis = EmbeddedRedis(self.layout.state / "redis") if EmbeddedRedis.installed() else None
        self.nats = EmbeddedNats(self.layout.state / "nats")
        self.broker = BrokerProgram(self)
        self.worker = WorkerProgram(self)
        self.daemon = DaemonProgram(self)
        redis = [] if self.redis is None else [self.redis]
        # every process, each after those that it needs
        self.programs: list[EmbeddedServer] = [
            *(self.postgres, *redis, self.nats, self.broker, self.worker, self.daemon)
        ]

    def start(self, say: Callable[[str], None], begin: Callable[[str], None] = lambda _: None) -> None:
        """Start what does not run, make the mesh and write the `env` file.

        For each program `begin` is called when it starts, and `say` when it is ready.
        """
        self.layout.create()
        for program in self.programs:
            begin(f"{program.name} starts")
            program.start()
            say(f"{program.name:<9} ready, pid {program.process.pid if program.process else '-'}")
            if program is self.broker:
                asyncio.run(create_mesh(self.broker, self.layout))
        quoted = {
            name: text if _PLAIN.fullmatch(text) else shlex.quote(text) for name, text in self.environment().items()
        }
        replace_private(self.layout.env_file, "".join(f"{name}={text}\n" for name, text in quoted.items()))

    def stop(self) -> None:
        """Stop everything, in the opposite order."""
        for program in reversed(self.programs):
            program.stop()

    def environment(self) -> Mapping[str, str]:
        """Return the variables by which every verb finds the stack (docs/contract/operate.md#operate-9)."""
        redis = {} if self.redis is None else {"POSTROOM_REDIS_URL": self.redis.url}
        return redis | {
            "POSTROOM_SOCKET": self.daemon.url,
            "POSTROOM_MESH": MESH,
            "POSTROOM_BROKER_URL": self.broker.url,
            "POSTROOM_BROKER_TOKEN_FILE": str(self.layout.token_file(SENDER)),
            "POSTROOM_ADMIN_TOKEN_FILE": str(self.layout.admin_token_file),
            "POSTROOM_DATABASE_URL": self.postgres.url,
            "POSTROOM_NATS_URL": self.nats.url,
            "POSTROOM_STATE": str(self.layout.state),
        }


@contextmanager
def fatal_failures() -> Iterator[None]:
    """End the command with the sentence of a process that does not start or stop."""
    try:
        yield
    except EmbeddedError as error:
        raise Fatal(Exit.FAILED, str(error)) from error
