"""Bytes of the outbox are damaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from support.damaged_outboxes import PAGE, Files, after, at_random, filled, overwrite, reckon, written

from faults.campaign import Missed, Run, goal

_LOGGED: Final = 4  # of so many rows one is in an outbox that was killed, with its log
_LEAST: Final = 80  # rows, among which there are all kinds


@goal("F15", "damage of outbox.db and its log")
async def damaged_outbox(run: Run) -> None:
    """Damage each page in turn, then any bytes: recovery saves a row as it was, or counts it as missing."""
    closed = await filled(run.place(), max(_LEAST, run.size.load), logged=False)
    logged = await filled(run.place(), max(_LEAST, run.size.load // _LOGGED), logged=True)
    for start in range(0, len(closed[""]), PAGE):
        content = run.chance.choice([b"\xa5" * PAGE, bytes(PAGE), run.chance.randbytes(PAGE)])
        _try(run, closed, overwrite("", start, content), f"page {start // PAGE} overwritten")
        run.struck["page"] += 1
    for _ in range(run.size.trials):
        seed = run.chance.randrange(2**32)
        _try(run, run.chance.choice([closed, logged]), at_random(seed), f"random damage {seed}")
        run.struck["bytes by chance"] += 1


def _try(run: Run, files: dict[str, bytes], damage: Callable[[Files], None], what: str) -> None:
    try:
        reckon(written(files), *after(files, damage))
    except AssertionError as error:
        raise Missed(f"{what}: {error}") from error
    run.trials += 1
