"""A large outbox: sends and claims with no rows, a million and three million, and the memory that the daemon takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from bench.claims import SIZES
from bench.processes import Daemon, daemon, load, output_of
from bench.report import Limit, Measured, Ratio, judge, judge_limit, show
from bench.send import STREAMS, stream

BACKLOGS: Final = (0, 1_000_000, 3_000_000)
_GOAL: Final = 0.7  # of the empty outbox
_MEMORY_GOAL: Final = 150  # MiB
_CLAIM_GOAL: Final = 5.0  # ms


def backlog(directory: Path, runs: int, seconds: float) -> None:
    """Fill one outbox step by step; at each step measure sends beside an empty outbox, and claims from the full one."""
    filled = 0
    for rows in BACKLOGS:
        with daemon(directory / "filled") as full:
            if rows > filled:
                stream(full, first=filled, lines=(rows - filled) // STREAMS)
            filled = rows + _sends(full, directory, rows=rows, first=max(rows, filled), runs=runs, seconds=seconds)
        if rows:
            _claims(directory / "filled" / "state")


def _sends(full: Daemon, directory: Path, *, rows: int, first: int, runs: int, seconds: float) -> int:
    """Compare sends at 64 connections with those into an empty outbox; returns how many ids were used."""
    pairs, p50, p99 = [], [], []
    used = 0
    for run in range(runs):
        with daemon(directory / f"empty-{rows}-{run}") as empty:
            alone = load(empty.socket, connections=64, seconds=seconds, first=0).per_second
        found = load(full.socket, connections=64, seconds=seconds, first=first + used)
        used += found.answers + 64
        pairs.append((found.per_second, alone))
        p50.append(found.p50)
        p99.append(found.p99)
    print(f"{rows:,} rows in the outbox")
    show(Measured("POST /v1/send, 64 connections", [sent for sent, _ in pairs], p50=p50, p99=p99))
    judge(Ratio("of the empty outbox", pairs, _GOAL))
    judge_limit(Limit("resident memory of the daemon", full.resident_bytes / 2**20, "MiB", _MEMORY_GOAL))
    return used


def _claims(state: Path) -> None:
    """Claim from the stopped daemon's outbox."""
    found = json.loads(output_of(["bench.claims", str(state)]))
    for rows, goal in zip(SIZES, (_CLAIM_GOAL, None), strict=True):
        p50, p99 = (1e3 * each for each in found[str(rows)])
        judge_limit(Limit(f"claim of {rows} rows, p99 (p50 {p50:.1f} ms)", p99, "ms", goal))
