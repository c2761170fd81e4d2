"""What a benchmark found: medians with their spread beside the goals, on the terminal and in docs/performance.md."""

from __future__ import annotations

import os
import platform
import re
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

PAGE: Final = Path(__file__).parents[1] / "docs" / "performance.md"
_PRECISE: Final = 10  # below it a figure has two digits behind the point
_COARSE: Final = 1000  # from here on it has none


class Measure(NamedTuple):
    """One figure of one run; a ratio is of two figures of that run."""

    what: str
    value: float
    unit: str
    part: str = ""  # of what: a process whose share this is

    def __str__(self) -> str:
        name = f"{self.what}, {self.part}" if self.part else self.what
        return f"{name:<60}{figure(self.value):>12} {self.unit}"


class Goal(NamedTuple):
    """What a figure's median has to reach, or may not exceed."""

    value: float
    at_most: bool = False

    def met(self, value: float) -> bool:
        """Compare a median with it."""
        return value <= self.value if self.at_most else value >= self.value

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {self.value:g}"


class Results:
    """All figures of one benchmark, in the order in which they were first measured."""

    def __init__(self, goals: Mapping[str, Goal], machine: str) -> None:
        """`machine` describes it as it was before the benchmark, which makes a load of its own."""
        self.missing: list[str] = []  # what could not be measured here, and why
        self.void: str | None = None
        self._goals = goals
        self._machine = machine
        self._values: dict[str, list[float]] = {}
        self._units: dict[str, str] = {}
        self._parts: dict[str, dict[str, list[float]]] = {}

    def add(self, measure: Measure) -> None:
        """Take a figure."""
        if measure.part:
            self._parts.setdefault(measure.what, {}).setdefault(measure.part, []).append(measure.value)
        else:
            self._values.setdefault(measure.what, []).append(measure.value)
            self._units[measure.what] = measure.unit

    @property
    def passed(self) -> bool:
        """Whether every run counts and every goal was measured and met."""
        return self.void is None and all(
            what in self._values and goal.met(median(self._values[what])) for what, goal in self._goals.items()
        )

    def lines(self) -> list[str]:
        """Return the rows of the table: what, median, least to most, goal, verdict."""
        rows = [self._row(what, self._values.get(what, ())) for what in dict.fromkeys([*self._values, *self._goals])]
        return ["| what | median | least to most | goal | |", "|---|---|---|---|---|", *rows]

    def _row(self, what: str, values: Sequence[float]) -> str:
        goal = self._goals.get(what)
        verdict = "" if goal is None else "met" if values and goal.met(median(values)) else "**missed**"
        if not values:
            return f"| {what} | not measured | | {goal} | {verdict} |"
        unit = self._units[what]
        parts = {part: median(shares) for part, shares in self._parts.get(what, {}).items()}
        if parts:
            listed = sorted(parts.items(), key=lambda each: -each[1])
            what += f" ({', '.join(f'{part} {figure(share)}' for part, share in listed)})"
        spread = f"{figure(min(values))} to {figure(max(values))}" if len(values) > 1 else "one run"
        return f"| {what} | {figure(median(values))} {unit} | {spread} | {goal or ''} | {verdict} |"

    def text(self, command: str) -> str:
        """Return all of it as Markdown."""
        lines = [f"`{command}`: {self._machine}.", ""]
        if self.void is not None:
            return "\n".join([*lines, f"**Void**: {self.void}."])
        return "\n".join([*lines, *self.lines(), *(f"\nNot measured: {each}." for each in dict.fromkeys(self.missing))])


def figure(value: float) -> str:
    """Write a figure with about three digits."""
    return f"{value:,.2f}" if abs(value) < _PRECISE else f"{value:,.1f}" if abs(value) < _COARSE else f"{value:,.0f}"


def machine() -> str:
    """Describe what figures are taken on, and how busy it is with other things."""
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before it, "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"
    )


def write(name: str, text: str, page: Path) -> None:
    """Put a benchmark's table into the page, between its own marks; raises `LookupError` where there are none."""
    begin, end = f"<!-- bench {name} -->", "<!-- until here -->"
    found = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    new, count = found.subn(lambda _: f"{begin}\n{text}\n{end}", page.read_text("utf-8"))
    if not count:
        raise LookupError(f"{page} has no place for {name}")
    page.write_text(new, "utf-8")
