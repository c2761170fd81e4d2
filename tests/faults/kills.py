"""The daemon is killed."""

from __future__ import annotations

from faults.campaign import Run, goal
from faults.load import mailroom, reckon, relayed, writing


@goal("F1", "kill -9 of the daemon", without="the commit before the answer")
async def killed_daemon(run: Run) -> None:
    """Kill it at random moments under load; what it acknowledged is accepted once."""
    async with mailroom(run) as room:
        if run.without:
            room.daemon.become("faults.without", run.without, "daemon")
            room.daemon.stop()
            room.daemon.start()
        async with writing(run, room) as writers:
            for kill in range(1, run.size.trials + 1):
                due = run.size.load * kill // run.size.trials
                await writers.reached(max(due, len(writers.acknowledged) + run.chance.randrange(1, 100)))
                room.daemon.kill()
                run.struck["kill -9"] += 1
                room.daemon.start()
                run.trials += 1
            await writers.reached(run.size.load)
        await room.daemon_ready()
        await relayed(room.state)
        await reckon(writers.acknowledged, room.database_url)
    run.figures.append(f"{len(writers.acknowledged):,} acknowledged")
