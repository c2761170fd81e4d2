"""Clocks jump."""

from __future__ import annotations

import asyncio
from typing import Final

from faults.campaign import Run, goal
from faults.load import kept, mailroom, reckon, relayed, writing
from faults.nemesis import Shim

_DAY: Final = 86_400.0  # seconds
_JUMPS: Final = (-3650 * _DAY, -_DAY, _DAY, 3650 * _DAY)
_JITTER: Final = 0.1  # of a jump
_REST: Final = 0.05  # seconds between two messages or batches of one writer
_LASTS: Final = 1.0  # seconds, at most
_RESTARTED: Final = 1 / 4  # of the jumps meet a start of the daemon


@goal("F18", "clocks a day and ten years off")
async def wrong_clocks(run: Run) -> None:
    """Let the daemon's clock jump, with a broker and without one: nothing is lost, and nothing expires early."""
    async with mailroom(run) as room:
        shim = Shim(run.place(), room.state)
        room.daemon.settle(shim.environment)
        room.daemon.stop()
        room.daemon.start()
        await room.daemon_ready()
        broker = room.brokers[0]
        async with writing(run, room, rest=_REST) as writers:
            for jump in range(1, run.size.trials + 1):
                await writers.reached(run.size.load * jump // run.size.trials)
                away = run.chance.random() < 1 / 2
                if away:
                    broker.kill()
                seconds = run.chance.choice(_JUMPS) * run.chance.uniform(1 - _JITTER, 1 + _JITTER)
                shim.set_clock_off(seconds)
                run.struck[f"{'ahead' if seconds > 0 else 'behind'}{', without a broker' if away else ''}"] += 1
                if run.chance.random() < _RESTARTED:
                    room.daemon.kill()
                    room.daemon.start()
                    run.struck["started under it"] += 1
                await asyncio.sleep(run.chance.uniform(0, _LASTS))
                shim.set_clock_off(0)
                if away:
                    broker.start()
                run.trials += 1
        await room.daemon_ready()
        await relayed(room.state)
        dead = [name for name, status in kept(room.state).items() if status == "dead"]
        run.check(not dead, f"{len(dead):,} messages expired early")
        await reckon(writers.acknowledged, room.database_url)
    run.figures.append(f"{len(writers.acknowledged):,} acknowledged")
