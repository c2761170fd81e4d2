"""Two things go wrong at once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, NamedTuple

from support.mailroom import Mailroom, Process

from embedded import EmbeddedPostgres, EmbeddedRedis
from embedded.server import EmbeddedServer
from faults.campaign import Run, create_database, goal
from faults.load import mailroom, reckon, relayed, writing
from faults.nemesis import Line, Shim, Strike, killed

_REST: Final = 0.05  # seconds between two messages or batches of one writer
_APART: Final = 0.3  # seconds that the second fault comes after the first, at most
_LAST: Final = 1.0  # seconds that both last then, at most
_LOOK_SECONDS: Final = 0.1  # between two looks whether the daemon runs
_OPERATIONS: Final = 50  # on files, within which a fault of the disk comes
_QUIET: Final = 5.0  # seconds between two strikes of the soak, at most
_BACKLOG_SECONDS: Final = 120.0
_DAY: Final = 86_400.0  # seconds


class Nemesis(NamedTuple):
    """One thing that goes wrong, and how it is put right."""

    name: str
    strike: Callable[[], Awaitable[None]]
    heal: Callable[[], Awaitable[None]]


@goal("F5", "pairs of faults")
async def pairs(run: Run) -> None:
    """Let two faults overlap, again and again: what was acknowledged is accepted once."""
    async with _house(run) as (room, nemeses):
        async with writing(run, room, rest=_REST) as writers:
            for pair in range(1, run.size.trials + 1):
                await writers.reached(run.size.load * pair // run.size.trials)
                await _overlap(run, run.chance.sample(nemeses, 2))
                run.trials += 1
        await relayed(room.state)
        await reckon(writers.acknowledged, room.database_url)
    run.figures.append(f"{len(writers.acknowledged):,} acknowledged")


@goal("F20", "an hour of random faults")
async def soak(run: Run) -> None:
    """Let one fault or two strike every few seconds for so many minutes; soon after the last the backlog is gone."""
    async with _house(run) as (room, nemeses):
        end = time.monotonic() + 60 * run.size.trials
        async with writing(run, room) as writers:
            while time.monotonic() < end or len(writers.acknowledged) < run.size.load:
                await _overlap(run, run.chance.sample(nemeses, run.chance.randrange(1, 3)))
                await asyncio.sleep(run.chance.uniform(0, _QUIET))
                run.trials += 1
        await relayed(room.state, seconds=_BACKLOG_SECONDS)
        await reckon(writers.acknowledged, room.database_url)
    run.figures.append(f"{len(writers.acknowledged):,} acknowledged")


async def _overlap(run: Run, nemeses: list[Nemesis]) -> None:
    """Let faults strike one after the other, last for a while, and end in any order."""
    for nemesis in nemeses:
        await nemesis.strike()
        run.struck[nemesis.name] += 1
        await asyncio.sleep(run.chance.uniform(0, _APART))
    await asyncio.sleep(run.chance.uniform(0, _LAST))
    run.chance.shuffle(nemeses)
    for nemesis in nemeses:
        await nemesis.heal()


async def _keep_running(daemon: Process) -> None:
    """Start the daemon again whenever the shim has killed it, which may be after the fault was healed."""
    while True:
        if daemon.exit_code == -signal.SIGKILL:
            daemon.start()
        await asyncio.sleep(_LOOK_SECONDS)


@asynccontextmanager
async def _house(run: Run) -> AsyncIterator[tuple[Mailroom, list[Nemesis]]]:
    """Run a mail room all of whose parts may fail, and yield it with all that may befall it."""
    postgres, redis = EmbeddedPostgres(run.place() / "postgres"), EmbeddedRedis(run.place() / "redis")
    async with AsyncExitStack() as undo:
        for server in (postgres, redis):
            server.start()
            undo.callback(server.stop)
        await create_database(postgres.url, "own")
        line = Line(postgres.socket_directory / ".s.PGSQL.5432", run.place() / ".s.PGSQL.5432")
        await undo.enter_async_context(line)
        url = f"postgresql://postroom@/own?host={line.here.parent}"  # type: ignore[union-attr]
        room = await undo.enter_async_context(mailroom(run, database_url=url, redis_url=redis.url))
        room.database_url = postgres.url_of("own")
        shim = Shim(run.place(), room.state)
        room.daemon.settle(shim.environment)
        room.daemon.stop()
        room.daemon.start()
        await room.daemon_ready()
        undo.callback(asyncio.create_task(_keep_running(room.daemon)).cancel)
        yield room, [*_nemeses(room, postgres, redis), *_of_shim(run, shim), _cut(line)]


def _nemeses(room: Mailroom, postgres: EmbeddedPostgres, redis: EmbeddedRedis) -> list[Nemesis]:
    broker = room.brokers[0]

    async def restart_broker() -> None:
        broker.kill()
        broker.start()

    async def restart_daemon() -> None:
        if room.daemon.running:
            room.daemon.kill()
        room.daemon.start()

    return [
        Nemesis("daemon killed", restart_daemon, _nothing),
        _stopped("daemon stopped", room.daemon),
        Nemesis("broker killed", restart_broker, _nothing),
        _stopped("broker stopped", broker),
        _killed("Postgres killed", postgres),
        _killed("Redis killed", redis),
    ]


async def _nothing() -> None:
    """Leave it to the service manager."""


def _stopped(name: str, program: Process) -> Nemesis:
    pids: list[int] = []

    async def strike() -> None:
        if program.running:
            pids.append(program.pid)
            os.kill(program.pid, signal.SIGSTOP)

    async def heal() -> None:
        if pids and program.running and program.pid == pids.pop():
            os.kill(program.pid, signal.SIGCONT)

    return Nemesis(name, strike, heal)


def _killed(name: str, server: EmbeddedServer) -> Nemesis:
    async def strike() -> None:
        killed(server)

    async def heal() -> None:
        server.stop()
        server.start()

    return Nemesis(name, strike, heal)


def _of_shim(run: Run, shim: Shim) -> list[Nemesis]:
    def failing(name: str, error: Strike, *, for_ever: bool) -> Nemesis:
        async def strike() -> None:
            shim.arm(run.chance.randrange(1, _OPERATIONS), error, for_ever=for_ever)

        async def heal() -> None:
            shim.lift()

        return Nemesis(name, strike, heal)

    async def jump() -> None:
        shim.set_clock_off(run.chance.uniform(-_DAY, _DAY))

    async def right() -> None:
        shim.set_clock_off(0)

    return [
        failing("disk full", Strike.FULL, for_ever=True),
        failing("disk failing once", Strike.EIO, for_ever=False),
        failing("killed within a write", Strike.KILL_HALFWAY, for_ever=False),
        Nemesis("clock wrong", jump, right),
    ]


def _cut(line: Line) -> Nemesis:
    return Nemesis("broker cut off from Postgres", line.cut, line.mend)
