"""Many daemons at one broker that has fewer slots than they have posts: it stays as fast, and serves all alike."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from broker.database import migrate
from embedded.processes import tethered
from postroom import BrokerClient

ADMIN_TOKEN = "an administrator's token for tests"
FIRST_TO_LAST = 0.8
MOST_TO_LEAST = 1.5

Crowd = list[Any]


@pytest.fixture
async def crowd(
    database_url: str, redis_url: str, tmp_path: Path, station: Any
) -> AsyncIterator[Callable[..., Awaitable[Crowd]]]:
    """Start a broker as a process of its own, and a number of relays, each a member with a backlog of its own."""
    processes: list[subprocess.Popen[bytes]] = []

    async def start(daemons: int, rows: int, config: dict[str, int], **relay: int) -> Crowd:
        admin = tmp_path / "admin-token"
        admin.touch(mode=0o600)
        admin.write_text(ADMIN_TOKEN)
        await migrate(database_url)
        lines = {"database_url": database_url, "redis_url": redis_url, "admin_token_file": str(admin), **config}
        file = tmp_path / "broker.toml"
        file.write_text("listen_port = 0\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items()))
        command = tethered([sys.executable, "-m", "broker", "--config", str(file)])
        process = subprocess.Popen(command, stderr=subprocess.PIPE)  # noqa: ASYNC220 - starting takes no time
        processes.append(process)
        assert process.stderr is not None
        url = json.loads(await asyncio.to_thread(process.stderr.readline))["url"]
        return [one async for one in _members(url, daemons, rows, relay)]

    async def _members(url: str, daemons: int, rows: int, relay: dict[str, int]) -> AsyncIterator[Any]:
        async with BrokerClient(url, ADMIN_TOKEN) as administrator:
            await administrator.create_mesh("demo")
            await administrator.create_queue("demo", "work")
            for number in range(daemons):
                name = f"m{number}"
                token_file = tmp_path / f"{name}.token"
                token_file.touch(mode=0o600)
                token_file.write_text((await administrator.create_member("demo", name)).token)
                here = await station(url, speed=1, link={"token_file": token_file}, name=name, **relay)
                for start in range(0, rows, 1000):
                    ids = [f"{name}-{row}" for row in range(start, min(rows, start + 1000))]
                    await here.send(*ids, to="queue:work")
                yield here

    yield start
    for process in processes:
        process.kill()
        process.wait()
        assert process.stderr is not None
        process.stderr.close()


async def drain(crowd: Crowd) -> tuple[float, float]:
    """Let all relay until the last is done; return the last quarter's speed by the first's, and who was served more.

    The second number is the most served by the least served, when half of everything was done.
    """
    rows = (await crowd[0].outbox.counts()).rows["pending"]
    total = rows * len(crowd)

    def done() -> list[int]:
        return [here.relay.counters.attempts["accepted"] for here in crowd]

    began = time.monotonic()
    for here in crowd:
        here.run()
    reached: list[float] = []
    served: list[int] = []
    while len(reached) < 4:
        await asyncio.sleep(0.002)
        if sum(done()) >= total * (len(reached) + 1) / 4:
            reached.append(time.monotonic() - began)
            served = done() if len(reached) == 2 else served
    quarters = [after - before for before, after in zip([0.0, *reached], reached, strict=False)]
    print(f"messages a second by quarter: {[round(total / 4 / seconds) for seconds in quarters]}")  # noqa: T201
    print(f"least and most served at half: {min(served)}, {max(served)}")  # noqa: T201 - what the soak is run for
    return quarters[0] / quarters[-1], max(served) / min(served)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("daemons", "config"), [(14, {"max_in_flight": 16}), (56, {})], ids=["14 at 16 slots", "56 at the defaults"]
)
async def test_a_crowd_of_daemons_is_served_as_fast_at_the_end_and_all_alike(
    crowd: Any, daemons: int, config: Any
) -> None:
    speed, unfairness = await drain(await crowd(daemons, 6000, config))
    assert speed >= FIRST_TO_LAST
    assert unfairness <= MOST_TO_LEAST


async def test_a_crowd_at_a_broker_with_one_slot_is_served_alike_in_batches_that_stay_large(crowd: Any) -> None:
    relays = await crowd(5, 400, {"max_in_flight": 1}, batch_messages=20)
    _, unfairness = await drain(relays)
    assert unfairness <= MOST_TO_LEAST
    assert {here.relay.counters.batches["answered"] for here in relays} <= {20, 21, 22}
