"""What a campaign consists of: goals, the runs of them, and what a run showed.

A goal is a promise of the product under one kind of fault. Its run lets the faults strike while programs work, and
raises `Missed` where the promise is broken. Its control is the same run on programs that lack one safeguard: it has to
miss. A run whose control held, or whose faults never struck, is void, for it would have shown nothing.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import asyncpg
import msgspec

from embedded import EmbeddedPostgres, EmbeddedRedis
from faults.sizes import SIZES, Size

GOALS: Final[dict[str, Goal]] = {}


class Missed(Exception):
    """The promise is broken; the text says how."""


class Lacking(Exception):
    """This machine lacks what the goal needs; the text says what."""


class Servers:
    """The Postgres and the Redis that the goals share which leave servers alone; each starts when first wanted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.postgres = EmbeddedPostgres(directory / "postgres", durable=False)
        self._redis = EmbeddedRedis(directory / "redis")
        self._databases = 0

    @property
    def redis_url(self) -> str:
        return self._redis.start()

    async def database(self) -> str:
        """Make a database and return its address."""
        self._databases += 1
        name = f"campaign_{self._databases}"
        await create_database(self.postgres.start(), name)
        return self.postgres.url_of(name)

    def stop(self) -> None:
        self.postgres.stop()
        self._redis.stop()


async def create_database(url: str, name: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(f'CREATE DATABASE "{name}"')
    await connection.close()


@dataclass
class Run:
    """One run of one goal: where it works, how much it does, and what it counted."""

    seed: int
    size: Size
    directory: Path
    servers: Servers
    scale: float = 1.0  # what part of a goal that counts its trials itself is run
    without: str | None = None  # the safeguard that the programs lack
    trials: int = 0
    struck: Counter[str] = field(default_factory=Counter)
    figures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._places = 0

    def place(self) -> Path:
        """Return a new directory of a short path."""
        self._places += 1
        place = self.directory / str(self._places)
        place.mkdir(mode=0o711)
        return place

    def check(self, holds: bool, otherwise: str) -> None:  # noqa: FBT001 - the sentence says which
        """Raise `Missed` unless it holds."""
        if not holds:
            raise Missed(otherwise)


@dataclass(frozen=True)
class Goal:
    """One row of the campaign's table."""

    name: str
    title: str
    run: Callable[[Run], Awaitable[None]]
    without: str | None  # what the control lacks
    alone: bool  # it measures times, beside which nothing else may run


def goal(
    name: str, title: str, *, without: str | None = None, alone: bool = False
) -> Callable[[Callable[[Run], Awaitable[None]]], Callable[[Run], Awaitable[None]]]:
    """Make a goal of a function."""

    def note(run: Callable[[Run], Awaitable[None]]) -> Callable[[Run], Awaitable[None]]:
        GOALS[name] = Goal(name, title, run, without, alone)
        return run

    return note


class Shown(msgspec.Struct):
    """What the run of a goal and of its control showed: a row of the table."""

    name: str
    seed: int
    result: str = ""
    control: str = "-"
    trials: int = 0
    seconds: float = 0.0
    struck: dict[str, int] = {}
    figures: list[str] = []

    @property
    def held(self) -> bool:
        return self.result == "held"

    @property
    def lacking(self) -> bool:
        return self.result.startswith("not run")


@dataclass(frozen=True)
class Campaign:
    """Where goals are run, and how much of each."""

    directory: Path
    servers: Servers
    soak: bool
    scale: float

    async def show(self, goal: Goal, seed: int) -> Shown:
        """Run a goal and its control."""
        sizes = SIZES[goal.name]
        size = sizes.soak if self.soak else sizes.ci
        limit = 60 * sizes.minutes * max(1, size.trials / max(1, sizes.ci.trials))
        scaled = Size(max(1, round(size.trials * self.scale)), round(size.load * self.scale))
        shown = Shown(goal.name, seed)
        began = time.monotonic()
        await self._run(goal, scaled, limit, shown)
        if shown.held and sizes.control is not None:
            await self._control(goal, sizes.control, limit, shown)
        shown.seconds = time.monotonic() - began
        return shown

    async def _run(self, goal: Goal, size: Size, limit: float, shown: Shown) -> None:
        with self._running(goal, size, shown) as run:
            try:
                async with asyncio.timeout(limit):
                    await goal.run(run)
            except Missed as missed:
                shown.result = f"MISSED: {missed}"
            except TimeoutError:
                shown.result = f"MISSED: not done within {limit:.0f} s"
            except Lacking as lack:
                shown.result = f"not run: needs {lack}"
            except Exception as error:  # noqa: BLE001 - whatever it was, the other goals shall run
                shown.result = _failure(error)
            else:
                idle = [what for what, count in run.struck.items() if not count]
                shown.result = (
                    "held" if run.struck and not idle else f"VOID: never struck: {', '.join(idle) or 'anything'}"
                )
        shown.trials, shown.struck, shown.figures = run.trials, dict(run.struck), run.figures

    async def _control(self, goal: Goal, size: Size, limit: float, shown: Shown) -> None:
        with self._running(goal, size, shown, goal.without) as run:
            try:
                async with asyncio.timeout(limit):
                    await goal.run(run)
            except Missed as missed:
                shown.control = f"without {goal.without}: {missed}"
            except Exception as error:  # noqa: BLE001 - the same
                shown.result = shown.control = _failure(error)
            else:
                shown.control = f"without {goal.without}: HELD"
                shown.result = "VOID: the control held"

    @contextmanager
    def _running(self, goal: Goal, size: Size, shown: Shown, without: str | None = None) -> Iterator[Run]:
        place = self.directory / f"{goal.name}{'c' if without else ''}"
        place.mkdir(mode=0o711)
        try:
            yield Run(shown.seed, size, place, self.servers, self.scale, without)
        finally:
            shutil.rmtree(place, ignore_errors=True)


def _failure(error: Exception) -> str:
    """Say that the campaign itself failed, and print where."""
    traceback.print_exception(error)
    return f"VOID: {type(error).__name__}: {error}"
