"""Each store of the registry, and a clock for it that only a test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
import pytest

from postroom.once import Registry, Scope, Store
from postroom.once.model import state_of
from postroom.once.postgres import PostgresStore
from postroom.once.sqlite import SqliteStore

START = 1_700_000_000.0


@dataclass
class Bench:
    """A store under test; `pass_time` lets seconds go by for it. Its registries never sleep: they let time go by."""

    store: Store
    pass_time: Callable[[float], Awaitable[None]]
    passed: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.passed.append(seconds)
        await self.pass_time(seconds)

    async def state(self, scope: Scope) -> str | None:
        row = (await self.store.look_up([scope.columns])).get(scope.columns)
        return row and state_of(row)

    def registry(self, *, group: str | None = None, lease: float = 30.0, wait: float = 0.0) -> Registry:
        return Registry(
            self.store, group=group, lease=lease, wait=wait, clock=lambda: sum(self.passed), sleep=self.sleep
        )


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now

    async def pass_time(self, seconds: float) -> None:
        self.now += seconds


async def postgres_bench(url: str) -> Bench:
    """Postgres keeps its own time, so that here the rows grow older instead."""
    store = await PostgresStore.open(url)

    async def pass_time(seconds: float) -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(
            "UPDATE postroom_once.idempotency_keys SET lease_until = lease_until - $1 * interval '1 second', "
            "begun_at = begun_at - $1 * interval '1 second' WHERE state = 'PENDING'",
            seconds,
        )
        await connection.execute("ALTER TABLE postroom_once.idempotency_keys DISABLE TRIGGER check_transition")
        await connection.execute(
            "UPDATE postroom_once.idempotency_keys SET settled_at = settled_at - $1 * interval '1 second' "
            "WHERE state <> 'PENDING'",
            seconds,
        )
        await connection.execute("ALTER TABLE postroom_once.idempotency_keys ENABLE TRIGGER check_transition")
        await connection.close()

    return Bench(store, pass_time)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/once.db"
    url: str = request.getfixturevalue("database_url")
    return url


@pytest.fixture
async def bench(place: str) -> AsyncIterator[Bench]:
    clock = Clock()
    if place.startswith("sqlite"):
        built = Bench(await SqliteStore.open(Path(place.removeprefix("sqlite://")), clock), clock.pass_time)
    else:
        built = await postgres_bench(place)
    yield built
    await built.store.close()


@pytest.fixture
async def in_postgres(database_url: str) -> AsyncIterator[Bench]:
    built = await postgres_bench(database_url)
    yield built
    await built.store.close()
