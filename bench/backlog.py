"""A large outbox: sends and claims with no rows, a million and three million, and the memory that the daemon takes."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Final

from bench.processes import daemon, load
from bench.report import Measured, Ratio, judge, show
from bench.send import STREAMS, stream

BACKLOGS: Final = (0, 1_000_000, 3_000_000)
_GOAL: Final = 0.7  # of the empty outbox
_MEMORY_GOAL: Final = 150 * 2**20  # bytes


def backlog(directory: Path, runs: int, seconds: float) -> None:
    """Fill one outbox step by step; at each step measure sends at 64 connections beside an empty outbox."""
    print("sends with a backlog, 64 connections")
    filled, first = 0, 0
    with daemon(directory / "filled") as full:
        for rows in BACKLOGS:
            if rows > filled:
                stream(full, first=first, lines=(rows - filled) // STREAMS)
                first += rows - filled
                filled = rows
            pairs, p99 = [], []
            for run in range(runs):
                with daemon(directory / f"empty-{rows}-{run}") as empty:
                    alone = load(empty.socket, connections=64, seconds=seconds, first=0).per_second
                found = load(full.socket, connections=64, seconds=seconds, first=first)
                first += found.answers + 64
                pairs.append((found.per_second, alone))
                p99.append(found.p99)
            show(Measured(f"{rows:,} rows", [sent for sent, _ in pairs], p50=p99, p99=p99))
            judge(Ratio("of the empty outbox", pairs, _GOAL))
            verdict = "reached" if full.resident_bytes <= _MEMORY_GOAL else "MISSED"
            print(f"    resident memory {full.resident_bytes / 2**20:.0f} MiB   goal 150: {verdict}")
            print(f"    p99 of a send {median(p99) * 1e3:.1f} ms")
