"""The fault campaign: `python -m faults [GOAL …]`, as `make faults` and `make faults-soak` call it.

    --soak          the long column
    --seed N        the seed of what is run, to see again what it showed
    --scale X       a part of the trials and the load, while developing; such a run shows nothing
    --write         put the table into docs/reliability.md; where goals are named, their rows

Prints a line as each goal ends, and the table in the end. Exit code 1 where a goal was missed or its run was void, 0
else; what could not run on this machine is named.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TextIO

import msgspec
import uvloop
from support.session import session_directory

from embedded.processes import tethered
from faults import (  # noqa: F401 - each makes its goals known
    brokers,
    clocks,
    damage,
    disk,
    fuzz,
    growth,
    jobs,
    kills,
    neighbours,
    older,
    pairs,
    points,
    replacement,
    simulation,
    streams,
)
from faults.campaign import GOALS, Campaign, Goal, Servers, Shown
from faults.report import line, replaced, table
from faults.sizes import SIZES

PAGE: Final = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN: Final = "<!-- the campaign's table -->"
END: Final = "<!-- until here -->"
_DESCRIPTORS: Final = 8192
_LANES: Final = 3  # on two cores


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description="The fault campaign.")
    parser.add_argument("goals", nargs="*", metavar="GOAL", help=f"some of: {', '.join(GOALS)}")
    parser.add_argument("--soak", action="store_true", help="the long column")
    parser.add_argument("--seed", type=int, help="the seed of every goal that is run")
    parser.add_argument("--scale", type=float, default=1.0, help="a part of the trials and the load")
    parser.add_argument("--write", action="store_true", help=f"put the table, or the goals' rows, into {PAGE.name}")
    parser.add_argument("--lane", action="store_true", help="run one goal for another campaign, which reads its result")
    options = parser.parse_args()
    if unknown := set(options.goals) - set(GOALS):
        parser.error(f"no such goal: {', '.join(sorted(unknown))}")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _DESCRIPTORS)), hard))
    os.umask(0o022)  # the unprivileged Postgres of root has to pass through what is made here, also in a lane
    os.chdir(PAGE.parents[1])
    columns = {name: sizes.soak if options.soak else sizes.ci for name, sizes in SIZES.items()}
    goals = [GOALS[name] for name, size in columns.items() if name in (options.goals or GOALS) and size.trials]
    if options.lane:
        sys.stdout.buffer.write(msgspec.json.encode(_one_by_one(goals, options, said=sys.stderr)))
        return 0
    began = time.monotonic()
    shown = _one_by_one([goal for goal in goals if goal.alone], options, said=sys.stdout)
    shown += asyncio.run(_in_lanes([goal for goal in goals if not goal.alone], options))
    shown.sort(key=lambda each: list(SIZES).index(each.name))
    text = table(shown, seconds=time.monotonic() - began, soak=options.soak, scale=options.scale)
    _say(f"\n{text}")
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        whole, _, after = rest.partition(END)
        text = replaced(text, whole) if options.goals else text
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 0 if all(each.held or each.lacking for each in shown) else 1


def _one_by_one(goals: Sequence[Goal], options: argparse.Namespace, said: TextIO) -> list[Shown]:
    """Run goals in this process, on servers that they share."""
    shown: list[Shown] = []
    if not goals:
        return shown
    with session_directory(Path(tempfile.gettempdir())) as directory:
        servers = Servers(directory)
        campaign = Campaign(directory, servers, options.soak, options.scale)
        try:
            for goal in goals:
                seed = random.randrange(10**6) if options.seed is None else options.seed
                _say(f"{goal.name}  {goal.title}: seed {seed} …", said)
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    shown.append(runner.run(campaign.show(goal, seed)))
                _say(line(shown[-1]), said)
        finally:
            servers.stop()
    return shown


async def _in_lanes(goals: Sequence[Goal], options: argparse.Namespace) -> list[Shown]:
    """Run goals side by side, each in a process of its own: most of them wait more than they work."""
    shown: list[Shown] = []
    waiting = iter(sorted(goals, key=lambda goal: -SIZES[goal.name].minutes))  # the longest first

    async def lane() -> None:
        for goal in waiting:
            words = [goal.name, "--lane", "--scale", str(options.scale), *(["--soak"] if options.soak else [])]
            words += [] if options.seed is None else ["--seed", str(options.seed)]
            command = tethered([sys.executable, "-m", "faults", *words])
            program = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            said, _ = await program.communicate()
            if program.returncode:
                shown.append(
                    Shown(goal.name, options.seed or 0, result=f"VOID: its process ended with {program.returncode}")
                )
            else:
                shown.extend(msgspec.json.decode(said, type=list[Shown]))

    await asyncio.gather(*(lane() for _ in range(_LANES)))
    return shown


def _say(text: str, to: TextIO = sys.stdout) -> None:
    to.write(f"{text}\n")
    to.flush()


if __name__ == "__main__":
    sys.exit(main())
