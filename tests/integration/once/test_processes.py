"""Workers as processes: they race, are killed at each step, and are stopped past their lease."""

from __future__ import annotations

import asyncio
import itertools
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.small_disk import run

from embedded.processes import tethered
from postroom.chassis.sqlite import transaction
from postroom.claims import Claim
from postroom.once import Scope, open_registry

WORKER = Path(__file__).parents[2] / "support" / "once_worker.py"
SHORT, LONG = "1", "60"  # seconds of a lease


class Workers:
    """Starts workers on one registry, which all write their effects to one file."""

    def __init__(self, place: str, effects: Path) -> None:
        self._place = place
        self._effects = effects
        self._started: list[asyncio.subprocess.Process] = []

    async def start(self, *words: str, lease: str = LONG) -> asyncio.subprocess.Process:
        command = tethered([sys.executable, str(WORKER), self._place, lease, str(self._effects), *words])
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        self._started.append(process)
        return process

    async def finish(self, *keys: str) -> list[str]:
        """Run a worker to its end and return what it says."""
        return await said(await self.start(*keys))

    def effects(self) -> Counter[str]:
        return Counter(self._effects.read_text().split()) if self._effects.exists() else Counter()

    async def end(self) -> None:
        for process in self._started:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def said(process: asyncio.subprocess.Process) -> list[str]:
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode().splitlines()


async def until(process: asyncio.subprocess.Process, step: str) -> None:
    assert process.stdout is not None
    assert await process.stdout.readline() == f"{step}\n".encode()


@pytest.fixture
async def workers(place: str, tmp_path: Path) -> AsyncIterator[Workers]:
    built = Workers(place, tmp_path / "effects")
    yield built
    await built.end()


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/once.db"
    url: str = request.getfixturevalue("database_url")
    return url


async def test_of_racing_processes_one_does_each_key(workers: Workers) -> None:
    keys = [f"k-{number}" for number in range(25)]
    racing = [await workers.start(*(keys if number % 2 else reversed(keys))) for number in range(4)]
    spoken = [await said(process) for process in racing]
    assert workers.effects() == Counter(keys)
    assert all({line.split()[-1] for line in lines} == set(keys) for lines in spoken)


@pytest.mark.parametrize(
    ("step", "effects", "then"),
    [
        ("begun", 1, "k 2 lease_expired k"),
        ("effect", 2, "k 2 lease_expired k"),  # the gap that no registry closes: the effect was had without a record
        ("committed", 1, "k 0 None k"),
    ],
)
async def test_what_a_killed_worker_had_begun_is_done_by_another(
    workers: Workers, step: str, effects: int, then: str
) -> None:
    killed = await workers.start("--stop-at", step, "k", lease=SHORT)
    await until(killed, step)
    killed.kill()
    await killed.wait()
    assert await workers.finish("k") == [then]
    assert workers.effects() == {"k": effects}
    assert await workers.finish("k") == ["k 0 None k"]
    assert workers.effects() == {"k": effects}


async def test_a_stopped_worker_that_wakes_up_past_its_lease_cannot_commit(workers: Workers) -> None:
    stopped = await workers.start("--stop-at", "begun", "k", lease=SHORT)
    await until(stopped, "begun")
    stopped.send_signal(signal.SIGSTOP)
    other: Any = await workers.start("--stop-at", "effect", "k")
    await until(other, "effect")  # it waited for the lease to run out
    stopped.send_signal(signal.SIGCONT)
    assert await _goes_on(stopped) == ["k lease_lost"]
    assert await _goes_on(other) == ["k 2 lease_expired k"]
    assert await workers.finish("k") == ["k 0 None k"]


async def test_a_worker_finds_the_moments_in_which_others_leave_the_file(tmp_path: Path) -> None:
    """SQLite itself looks again after 0.1 s: between busy workers one had "database is locked" after 5 s."""
    file, held, done, times = tmp_path / "once.db", threading.Event(), threading.Event(), itertools.count()

    def keep_busy() -> None:
        db = sqlite3.connect(file, isolation_level=None)
        while not done.wait(0.005):
            with transaction(db):
                next(times)
                held.set()
                done.wait(0.3)
                held.clear()
        db.close()

    async with open_registry(f"sqlite://{file}") as registry:
        others = asyncio.create_task(asyncio.to_thread(keep_busy))
        try:
            for number in range(6):
                await asyncio.to_thread(held.wait)
                assert isinstance(await registry.begin(Scope("acme", "orders", f"k-{number}")), Claim)
        finally:
            done.set()
            await others
    assert next(times) < 18


FORKED = """
import asyncio, multiprocessing, sys
from postroom.once import open_registry

async def claim(registry, key):
    async with registry.once("acme", "orders", key) as claim:
        if claim.first:
            claim.result = key
        return claim.first

def forked(registry):
    try:
        asyncio.run(claim(registry, "child's"))
    except RuntimeError as error:
        print(error, flush=True)
    asyncio.run(registry._store.close())

async def main():
    async with open_registry(sys.argv[1], wait=0) as registry:
        print(await claim(registry, "k"), flush=True)
        child = multiprocessing.get_context("fork").Process(target=forked, args=(registry,), daemon=True)
        child.start()
        await asyncio.to_thread(child.join, 20)
        print(child.exitcode, await claim(registry, "l"), await claim(registry, "l"), flush=True)

asyncio.run(main())
"""


async def test_a_forked_process_is_told_to_open_a_registry_of_its_own(place: str) -> None:
    refused = "this registry is closed, or was opened before a fork: open one in this process"
    assert await run(sys.executable, "-c", FORKED, place) == ["True", refused, "0 True False"]


async def test_a_registry_that_was_closed_does_not_say_to_try_again(place: str) -> None:
    async with open_registry(place) as registry:
        pass
    with pytest.raises(RuntimeError, match="this registry is closed, or was opened before a fork"):
        await registry.begin(Scope("acme", "orders", "k-1"))


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
async def test_a_registry_is_of_one_event_loop(database_url: str, tmp_path: Path, kind: str) -> None:
    """As its leases are, which end unrenewed with the loop of the thread that held the first of them.

    In Postgres a step in the loop of another thread broke a connection; one in memory "must be repaired".
    """
    url = {"memory": "memory:", "sqlite": f"sqlite://{tmp_path}/once.db", "postgres": database_url}[kind]
    scope = Scope("acme", "orders", "k-1")
    async with open_registry(url) as registry:
        with pytest.raises(RuntimeError, match="belongs to another event loop: open one in this loop"):
            await asyncio.to_thread(asyncio.run, registry.begin(scope))
        assert isinstance(await registry.begin(scope), Claim)


async def _goes_on(process: asyncio.subprocess.Process) -> list[str]:
    out, _ = await process.communicate(b"\n")
    return out.decode().splitlines()
