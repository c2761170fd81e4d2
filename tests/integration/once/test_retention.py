"""What was done once is forgotten after its time, by whoever looks after the store."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support.mailroom import worker
from support.waiting import until, until_so

from postroom.chassis.postgres import migrate
from postroom.delivery import ROOM
from postroom.once import Registry, Result, Run, Scope, Store, open_registry
from postroom.once.registry import _forgetting
from postroom.once.sqlite import SqliteStore

OLD, NEW = Scope("shop", "orders", "old", "billing"), Scope("shop", "orders", "new", "billing")
DAY = 86_400.0


@pytest.mark.parametrize(("keep_days", "kept"), [(None, False), (101, True)])
async def test_a_file_forgets_what_ended_too_long_ago_when_it_is_opened(
    tmp_path: Path, *, keep_days: float | None, kept: bool
) -> None:
    file = tmp_path / "once.db"
    for scope, age in ((OLD, 100), (NEW, 89)):
        store = await SqliteStore.open(file, lambda age=age: time.time() - age * DAY)
        await end(store, scope)
        await store.close()
    async with open_registry(f"sqlite://{file}", group="billing", keep_days=keep_days):
        store = await SqliteStore.open(file)

        assert set(await store.look_up([OLD.columns, NEW.columns])) == {NEW.columns} | (
            {OLD.columns} if kept else set()
        )
        await store.close()


async def test_a_clock_that_may_be_ahead_forgets_nothing(tmp_path: Path) -> None:
    """Under it every key looks old, but for those that end meanwhile; an hour later it is believed."""
    file, hours, slept = tmp_path / "once.db", asyncio.Semaphore(0), 0
    before = await SqliteStore.open(file, lambda: time.time() - 3650 * DAY)
    await end(before, OLD)
    await before.close()

    async def sleep(_seconds: float) -> None:
        nonlocal slept
        slept += 1
        await hours.acquire()

    store = await SqliteStore.open(file)
    forgetting = await _forgetting(Registry(store, sleep=sleep), store, 90)
    await end(store, NEW)
    for hour, left in ((1, {OLD.columns, NEW.columns}), (2, {NEW.columns})):
        hours.release()
        await until(lambda hour=hour: slept == hour + 1)
        assert set(await store.look_up([OLD.columns, NEW.columns])) == left
    forgetting.cancel()
    await asyncio.wait([forgetting])
    await store.close()


async def test_a_clock_of_postgres_that_may_be_ahead_forgets_nothing(database_url: str) -> None:
    """That of the program is right, and does not count: keys are deleted by that of Postgres."""
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        """
        CREATE SCHEMA ahead;
        CREATE FUNCTION ahead.clock_timestamp() RETURNS timestamptz LANGUAGE sql
        RETURN pg_catalog.clock_timestamp() + interval '10 years';
        """
    )
    await connection.close()
    async with open_registry(database_url) as registry:
        await end(registry._store, OLD)
    ahead = f"{database_url}{'&' if '?' in database_url else '?'}search_path=ahead,pg_catalog"
    async with open_registry(ahead, group="billing", keep_days=90) as registry:
        assert set(await registry._store.look_up([OLD.columns])) == {OLD.columns}


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        *(({"keep_days": days}, "keep_days must be more than 0") for days in (0, math.nan, math.inf)),
        *(({"lease": seconds}, "a lease must last more than 0 seconds") for seconds in (0, math.nan, math.inf, 1e12)),
        *(({"wait": seconds}, "and a wait 0 or more") for seconds in (-1, math.nan)),
    ],
    ids=str,
)
async def test_times_that_are_none_are_refused(given: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        async with open_registry("memory:", **given):  # type: ignore[arg-type] # no `group` among them
            pass


async def test_a_worker_forgets_what_its_database_has_kept_for_long_enough(
    database_url: str, nats_url: str, in_postgres: Any
) -> None:
    await migrate(database_url, ROOM)
    store = in_postgres.store
    await end(store, OLD)
    await in_postgres.pass_time(40 * DAY)
    await end(store, NEW)

    async def is_gone() -> bool:
        return not await store.look_up([OLD.columns])

    settings = {"POSTROOM_WORKER_DATABASE_URL": database_url, "POSTROOM_WORKER_NATS_URL": nats_url}
    with worker(**settings, POSTROOM_WORKER_ONCE_KEEP_DAYS="30"):
        await until_so(is_gone)

    assert await store.look_up([NEW.columns])


async def end(store: Store, scope: Scope) -> None:
    registry = Registry(store)
    run = await registry.begin(scope)
    assert isinstance(run, Run)
    await registry.commit(scope, run.owner, Result.of("charged"))
