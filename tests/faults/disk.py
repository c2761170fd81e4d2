"""The disk loses power, and fills up."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from support.mailroom import TOPIC, Mailroom
from support.waiting import until

from faults.campaign import Run, goal
from faults.load import kept, mailroom, reckon, relayed, writing
from faults.nemesis import Shim, Strike
from faults.power_cut import Platter
from postroom import AsyncClient, PostroomError

_OPERATIONS: Final = 300  # on files, within which a fault comes
_BACK_WITHIN: Final = 2.0  # seconds after there is space again
_LOOK_SECONDS: Final = 0.02


@goal("F4", "power cut of SQLite files", without="synchronous = FULL")
async def power_cut(run: Run) -> None:
    """Cut it under load: what was acknowledged is in the outbox after each cut, and accepted once in the end."""
    async with mailroom(run) as room:
        shim = Shim(run.place(), room.state)
        room.daemon.settle(shim.environment)
        if run.without:
            room.daemon.become("faults.without", run.without, "daemon")
        room.daemon.stop()
        platter, record = _switch_on(run, room, shim)
        async with writing(run, room) as writers:
            for cut in range(1, run.size.trials + 1):
                due = run.size.load * cut // run.size.trials
                await writers.reached(max(due, len(writers.acknowledged) + run.chance.randrange(1, 100)))
                shim.arm(run.chance.randrange(1, _OPERATIONS), Strike.KILL_HALFWAY)
                await until(lambda: not room.daemon.running)
                shim.lift()
                run.struck["cut"] += 1
                run.struck["piece of a write gone"] += platter.cut(record, run.chance)
                lost = writers.acknowledged.keys() - kept(room.state).keys()
                run.check(
                    not lost, f"{len(lost):,} of {len(writers.acknowledged):,} acknowledged are not in the outbox"
                )
                run.trials += 1
                platter, record = _switch_on(run, room, shim)
        await room.daemon_ready()
        await relayed(room.state)
        await reckon(writers.acknowledged, room.database_url)
    run.figures.append(f"{len(writers.acknowledged):,} acknowledged")


def _switch_on(run: Run, room: Mailroom, shim: Shim) -> tuple[Platter, Path]:
    """Start the daemon, with a record of what it does to its files."""
    platter, record = Platter(room.state), run.place() / "record"
    shim.record(record)
    room.daemon.start()
    return platter, record


@goal("F14", "a full disk", alone=True)
async def full_disk(run: Run) -> None:
    """Fill it at random moments under load: soon after there is space, the same process accepts again."""
    async with mailroom(run) as room:
        shim = Shim(run.place(), room.state)
        room.daemon.settle(shim.environment)
        room.daemon.stop()
        room.daemon.start()
        await room.daemon_ready()
        process, slowest = room.daemon.pid, 0.0
        async with writing(run, room) as writers, AsyncClient(room.socket, patience=0) as client:
            for fill in range(1, run.size.trials + 1):
                await writers.reached(run.size.load * fill // run.size.trials)
                shim.arm(run.chance.randrange(1, _OPERATIONS), Strike.FULL, for_ever=True)
                await until(lambda: shim.striking)
                await asyncio.sleep(run.chance.uniform(0, 1))
                run.struck["write without space"] += shim.lift()
                seconds = await _until_accepted(client)
                slowest = max(slowest, seconds)
                run.check(seconds <= _BACK_WITHIN, f"the daemon accepts {seconds:.1f} s after there is space")
                run.check(room.daemon.pid == process, f"the daemon was restarted: {room.daemon.log()[-500:]}")
                run.trials += 1
        await relayed(room.state)
        await reckon(writers.acknowledged, room.database_url)
    run.figures.append(f"accepts after at most {slowest:.2f} s")


async def _until_accepted(client: AsyncClient) -> float:
    """Return how long it takes until a send is acknowledged."""
    began = time.monotonic()
    while True:
        try:
            await client.send(TOPIC, "is there space?")
        except PostroomError:
            await asyncio.sleep(_LOOK_SECONDS)
        else:
            return time.monotonic() - began
