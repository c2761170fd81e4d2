"""The processes of a stack, in the order in which they need each other, and its mesh."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cli.stack.layout import MESH, SENDER, Layout
from cli.stack.programs import BrokerProgram, DaemonProgram, WorkerProgram
from embedded import EmbeddedError, EmbeddedNats, EmbeddedPostgres, EmbeddedRedis, EmbeddedServer
from postroom import Conflict
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import replace_private

MEMBERS: Final = (SENDER, "bob")
TOPIC: Final = "orders"
QUEUE: Final = "work"
_PLAIN: Final = re.compile(r"[\w@%+=:,./?-]+")  # what a shell takes as it is in an assignment


async def create_mesh(program: BrokerProgram, layout: Layout) -> None:
    """Create what is missing, at every start; raises `PostroomError` where the broker refuses."""
    async with program.client() as broker:
        with suppress(Conflict):
            await broker.create_mesh(MESH)
        for name in MEMBERS:
            if layout.token_file(name).exists():
                continue
            try:
                member = await broker.create_member(MESH, name)
            except Conflict:  # a crash came between the member and its token
                member = await broker.rotate_member_token(MESH, name)
            replace_private(layout.token_file(name), f"{member.token}\n")
        with suppress(Conflict):
            await broker.create_topic(MESH, TOPIC)
        with suppress(Conflict):
            await broker.create_queue(MESH, QUEUE)
        for name in MEMBERS:
            with suppress(Conflict):
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

    @property
    def programs(self) -> tuple[EmbeddedServer, ...]:
        """Every process, each after those that it needs."""
        redis = () if self.redis is None else (self.redis,)
        return (self.postgres, *redis, self.nats, self.broker, self.worker, self.daemon)

    def start(self, say: Callable[[str], None], begin: Callable[[str], None] = lambda _: None) -> None:
        """Start what does not run, make the mesh and write the `env` file.

        Of each program `begin` is told that it starts, and `say` that it is ready.
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
    """Let a process that does not start or stop end the command with its sentence."""
    try:
        yield
    except EmbeddedError as error:
        raise Fatal(Exit.FAILED, str(error)) from error
