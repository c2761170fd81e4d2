"""The power fails."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from mailroom import Mailroom
from waiting import until

from faults.campaign import Run, goal
from faults.load import kept, mailroom, reckon, relayed, writing
from faults.nemesis import Shim, Strike
from faults.power_cut import Platter

_OPERATIONS: Final = 300  # on files, within which the cut comes


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
