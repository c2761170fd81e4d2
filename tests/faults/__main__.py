"""The fault campaign: `python -m faults [GOAL …]`, as `make faults` and `make faults-soak` call it.

    --soak          the long column
    --seed N        the seed of what is run, to see again what it showed
    --scale X       a part of the trials and the load, while developing; such a run shows nothing
    --write         put the table into docs/reliability.md

Prints a line as each goal ends, and the table in the end. Exit code 1 where a goal was missed or its run was void, 0
else; what could not run on this machine is named.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import resource
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import uvloop
from session import session_directory

from faults import brokers, disk, fuzz, growth, jobs, kills, neighbours, pairs, points, streams  # noqa: F401 - each makes its goals known
from faults.campaign import GOALS, Campaign, Goal, Servers, Shown
from faults.sizes import SIZES

PAGE: Final = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN: Final = "<!-- the campaign's table -->"
END: Final = "<!-- until here -->"
_DESCRIPTORS: Final = 8192


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults", description="The fault campaign.")
    parser.add_argument("goals", nargs="*", metavar="GOAL", help=f"some of: {', '.join(GOALS)}")
    parser.add_argument("--soak", action="store_true", help="the long column")
    parser.add_argument("--seed", type=int, help="the seed of every goal that is run")
    parser.add_argument("--scale", type=float, default=1.0, help="a part of the trials and the load")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    options = parser.parse_args()
    if unknown := set(options.goals) - set(GOALS):
        parser.error(f"no such goal: {', '.join(sorted(unknown))}")
    chosen = [GOALS[name] for name in SIZES if name in (options.goals or GOALS)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _DESCRIPTORS)), hard))
    os.chdir(PAGE.parents[1])
    shown = _campaign(chosen, soak=options.soak, seed=options.seed, scale=options.scale)
    text = table(shown, soak=options.soak, scale=options.scale)
    _say(f"\n{text}")
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")
    return 0 if all(each.held or each.lacking for each in shown) else 1


def _campaign(goals: Sequence[Goal], *, soak: bool, seed: int | None, scale: float) -> list[Shown]:
    shown = []
    with session_directory() as directory:
        servers = Servers(directory)
        campaign = Campaign(directory, servers, soak, scale)
        try:
            for goal in goals:
                chosen = random.randrange(10**6) if seed is None else seed
                _say(f"{goal.name}  {goal.title}: seed {chosen} …")
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    shown.append(runner.run(campaign.show(goal, chosen)))
                _say(_line(shown[-1]))
        finally:
            servers.stop()
    return shown


def table(shown: Sequence[Shown], *, soak: bool, scale: float) -> str:
    """Return what was shown, as Markdown."""
    column = "make faults-soak" if soak else "make faults"
    of = "" if scale == 1 else f", {scale:g} of its size (which shows nothing)"
    minutes = sum(each.seconds for each in shown) / 60
    machine = f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    head = f"`{column}`{of}: {datetime.now(UTC):%Y-%m-%d}, {minutes:.0f} minutes, {machine}, {_user()}.\n"
    names = "| goal | trials | seconds | seed | what struck | result | figures | control | at most |\n"
    return head + "\n" + names + "|---|---|---|---|---|---|---|---|---|\n" + "\n".join(map(_row, shown))


def _row(shown: Shown) -> str:
    struck = ", ".join(f"{what}: {count:,}" for what, count in sorted(shown.struck.items())) or "-"
    bound = f"{3 / shown.trials:.2%}" if shown.held and shown.trials else "-"
    cells = [
        f"{shown.goal.name} {shown.goal.title}",
        f"{shown.trials:,}",
        f"{shown.seconds:.0f}",
        str(shown.seed),
        struck,
    ]
    cells += [shown.result, "; ".join(shown.figures) or "-", shown.control, bound]
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def _line(shown: Shown) -> str:
    again = "" if shown.held or shown.lacking else f"  again: python -m faults {shown.goal.name} --seed {shown.seed}"
    figures = "; ".join([f"{what}: {count:,}" for what, count in sorted(shown.struck.items())] + shown.figures)
    return f"    {shown.seconds:5.0f} s  {shown.result}  ({figures})  control: {shown.control}{again}"


def _user() -> str:
    return "as root" if os.geteuid() == 0 else "as a plain user"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
