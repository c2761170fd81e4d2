"""How figures are printed: medians with their spread, and ratios taken pair by pair within one run."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple


class Measured(NamedTuple):
    """One thing measured several times: messages a second, and what came with them where it is known."""

    what: str
    per_second: Sequence[float]
    p50: Sequence[float] = ()  # seconds
    p99: Sequence[float] = ()  # seconds
    commits: Sequence[float] = ()  # a second


class Ratio(NamedTuple):
    """Pairs of a thing and its baseline, measured one after the other, and the goal of docs/performance.md if any."""

    what: str
    pairs: Sequence[tuple[float, float]]
    goal: float | None = None

    @property
    def values(self) -> list[float]:
        """The ratio of each pair."""
        return [thing / baseline for thing, baseline in self.pairs]


class Limit(NamedTuple):
    """A figure that shall not be exceeded, in its unit, and the most that it may be, if there is such a goal."""

    what: str
    value: float
    unit: str
    most: float | None = None


class Floor(NamedTuple):
    """Messages a second of several runs, and the least that their median may be."""

    what: str
    per_second: Sequence[float]
    least: float


def machine() -> str:
    """Describe what the figures were taken on, and how busy it is with other things."""
    load = ", ".join(f"{value:.2f}" for value in os.getloadavg())
    return (
        f"{os.cpu_count()} cores, load {load} (1, 5, 15 min), Python {platform.python_version()}, "
        f"SQLite {sqlite3.sqlite_version}"
    )


def show(measured: Measured) -> None:
    """Print one line for a thing measured."""
    line = f"  {measured.what:<44}{spread(measured.per_second, '/s', 0):>34}"
    if measured.p50:
        line += f"   p50 {median(measured.p50) * 1e3:6.2f} ms  p99 {median(measured.p99) * 1e3:6.2f} ms"
    if measured.commits:
        line += f"   {median(measured.commits):6.0f} commits/s"
    print(line, flush=True)


def judge(ratio: Ratio) -> None:
    """Print a ratio beside its goal."""
    line = f"  = {ratio.what:<42}{spread(ratio.values, ' x', 2):>34}"
    if ratio.goal is not None:
        line += f"   goal {ratio.goal:g}: {'reached' if median(ratio.values) >= ratio.goal else 'MISSED'}"
    print(line, flush=True)


def judge_limit(limit: Limit) -> None:
    """Print a figure beside the most that it may be."""
    line = f"  {limit.what:<44}{f'{limit.value:,.1f} {limit.unit}':>34}"
    if limit.most is not None:
        line += f"   goal {limit.most:g}: {'reached' if limit.value <= limit.most else 'MISSED'}"
    print(line, flush=True)


def judge_floor(floor: Floor) -> None:
    """Print a rate beside the least that it may be."""
    line = f"  {floor.what:<44}{spread(floor.per_second, '/s', 0):>34}"
    reached = median(floor.per_second) >= floor.least
    print(f"{line}   goal {floor.least:,.0f}: {'reached' if reached else 'MISSED'}", flush=True)


def spread(values: Sequence[float], unit: str, digits: int) -> str:
    """Return `median (least to most)`."""
    low, high = min(values), max(values)
    return f"{median(values):,.{digits}f}{unit} ({low:,.{digits}f} to {high:,.{digits}f})"
