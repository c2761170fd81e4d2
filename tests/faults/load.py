"""What programs do while faults strike, and the reckoning afterwards: acknowledged against kept, accepted and handled.

The reckoning asks SQLite and Postgres themselves, never the programs under test.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Final

import asyncpg
from support.mailroom import Mailroom, Process
from support.waiting import until_so
from support.writers import Writers

from faults.campaign import Missed, Run

_WRITERS: Final = 6
_BATCH_WRITERS: Final = 2
_REST_SECONDS: Final = 300.0
_LOOK_SECONDS: Final = 0.02
RESTARTED: Final = (69, 74, 75)  # exit codes after which a service manager starts a program again
_NO_LIMIT: Final = {"POSTROOM_BROKER_LIMITER_PER_MESH": 10**9, "POSTROOM_BROKER_LIMITER_PER_MEMBER": 10**9}


@asynccontextmanager
async def mailroom(
    run: Run, *, database_url: str | None = None, redis_url: str | None = None, brokers: int = 1
) -> AsyncIterator[Mailroom]:
    """Run a mail room, on the campaign's servers unless the goal has its own, with a limiter that lets all pass."""
    database_url = database_url or await run.servers.database()
    room = Mailroom(run.place(), database_url, redis_url or run.servers.redis_url, brokers=brokers)
    for broker in room.brokers:
        broker.settle(_NO_LIMIT)
    try:
        await room.open()
        yield room
    finally:
        room.close()


@asynccontextmanager
async def writing(run: Run, room: Mailroom, *, rest: float = 0.0) -> AsyncIterator[Writers]:
    """Let programs send for the length of the block, each with a rest of so many seconds after every answer.

    A daemon that ends by itself meanwhile is a miss.
    """
    writers = Writers(room.socket, random.Random(run.seed), rest=rest)
    try:
        async with asyncio.TaskGroup() as group:
            senders = [group.create_task(writers.write()) for _ in range(_WRITERS)]
            senders += [group.create_task(writers.write_batches()) for _ in range(_BATCH_WRITERS)]
            watchers = [group.create_task(_watch(program)) for program in (room.daemon, *room.brokers)]
            yield writers
            writers.enough.set()
            await asyncio.wait(senders)
            for watcher in watchers:
                watcher.cancel()
    except BaseExceptionGroup as errors:
        for error in errors.exceptions:
            if isinstance(error, Missed):
                raise error from None
        raise


async def _watch(program: Process) -> None:
    """Keep a program running as a service manager does; what it does not start again is a miss."""
    while True:
        if program.exit_code in RESTARTED:
            program.start()
        elif program.exit_code not in (None, -signal.SIGKILL):  # nobody but the goal kills
            raise Missed(f"a program ended with {program.exit_code}: {program.log()[-500:]}")
        await asyncio.sleep(_LOOK_SECONDS)


def kept(state: Path) -> dict[str, str]:
    """Return the state of each row of a daemon's outbox, by its client_message_id."""
    with closing(sqlite3.connect(f"file:{state / 'outbox.db'}?mode=ro", uri=True)) as db:
        return dict(db.execute("SELECT client_message_id, status FROM outbox"))


async def relayed(state: Path, *, seconds: float = _REST_SECONDS) -> None:
    """Return when nothing waits in the outbox any more."""

    async def empty() -> bool:
        with closing(sqlite3.connect(f"file:{state / 'outbox.db'}?mode=ro", uri=True, timeout=30)) as db:
            (waiting,) = db.execute("SELECT count(*) FROM outbox WHERE status IN ('pending', 'inflight')").fetchone()
        return not waiting

    try:
        await until_so(empty, seconds=seconds)
    except TimeoutError:
        raise Missed(f"the outbox was not relayed within {seconds:.0f} s") from None


async def accepted(database_url: str) -> Mapping[str, list[bytes]]:
    """Return the bodies of the topics' messages that Postgres holds, by id: one each, where all is well."""
    database = await asyncpg.connect(database_url)
    rows = await database.fetch("SELECT client_message_id, body FROM mesh.topic_message")
    await database.close()
    held: defaultdict[str, list[bytes]] = defaultdict(list)
    for name, body in rows:
        held[name].append(body)
    return held


async def reckon(acknowledged: Mapping[str, bytes], database_url: str) -> None:
    """Raise `Missed` unless what was acknowledged is accepted, once, byte for byte."""
    held = await accepted(database_url)
    lost = [name for name in acknowledged if name not in held]
    doubled = [name for name, bodies in held.items() if len(bodies) > 1]
    changed = [name for name, body in acknowledged.items() if name in held and held[name][0] != body]
    if lost or doubled or changed:
        raise Missed(
            f"of {len(acknowledged):,} acknowledged {len(lost):,} lost, {len(doubled):,} accepted twice, "
            f"{len(changed):,} changed ({', '.join([*lost, *doubled, *changed][:3])})"
        )
