"""What `postroom up` costs: the command line, and the stack when nothing happens."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.mailroom import consumer
from bench.processes import Handled, Meter, handler
from bench.report import Measure, Results

_POSTROOM: Final = str(Path(sys.executable).with_name("postroom"))
_TIMES: Final = 5  # that each command is run
_COMMANDS: Final = {
    "postroom send": ("send", "topic:orders", "hello"),
    "postroom status": ("status",),
    "postroom --help": ("--help",),
}
_SETTLE_SECONDS: Final = 10.0  # until what starting has left to do is done
_IDLE_SECONDS: Final = 30.0


async def commands(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Run each command five times beside a running stack; its CPU, all its processes together."""
    del scale
    with _up(place) as environment:
        for name, words in _COMMANDS.items():
            for _ in range(_TIMES):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                _run(environment, *words)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                yield Measure(f"{name}: CPU", after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, "s")


async def idle(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Leave `postroom up` and a consumer alone; how often their threads wake, and what share of a core they use."""
    seconds = _IDLE_SECONDS * scale
    with (
        _up(place) as environment,
        handler(place, Handled(place)) as (url, _),
        consumer(place, environment, url) as pid,
    ):
        told = [json.loads(line) for line in _run(environment, "status", "--json").splitlines()]
        meter = Meter({one["process"]: one["pid"] for one in told if "process" in one} | {"consumer": pid})
        await asyncio.sleep(_SETTLE_SECONDS * scale)
        cpu, wakeups = meter.cpu(), meter.wakeups()
        await asyncio.sleep(seconds)
        cpu_after, wakeups_after = meter.cpu(), meter.wakeups()
    used = {part: (cpu_after[part] - before) / seconds * 100 for part, before in cpu.items()}
    woken = {part: (wakeups_after[part] - before) / seconds for part, before in wakeups.items()}
    yield Measure("the stack: CPU", sum(used.values()), "% of a core")
    yield Measure("the stack: wake-ups", sum(woken.values()), "/s")
    for part, share in used.items():
        yield Measure("the stack: CPU", share, "% of a core", part)
        yield Measure("the stack: wake-ups", woken[part], "/s", part)


@contextmanager
def _up(place: Path) -> Iterator[dict[str, str]]:
    """Run `postroom up` while the block lasts; yields the variables that it writes for a shell."""
    environment = {"POSTROOM_STATE": str(place / "up")}
    _run(environment, "up", "--detach")
    try:
        lines = (place / "up" / "env").read_text().splitlines()
        yield environment | dict(line.removeprefix("export ").split("=", 1) for line in lines if "=" in line)
    finally:
        _run(environment, "down")


def _run(environment: dict[str, str], *words: str) -> bytes:
    """Run a command of ours to its end."""
    return subprocess.run(  # noqa: S603 - our own command
        [_POSTROOM, *words], env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
    ).stdout
