"""Three NATS servers: replicas by one setting, leaders killed under load, and no wrong word of streams in the log."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support.handlers import serving
from support.hostile import quiet_logs
from support.http_consumers import consuming
from support.nats_cluster import running_cluster
from support.waiting import until, until_so

from broker.database import migrate
from embedded.processes import tethered
from postroom.delivery.settings import ConsumerSettings, HandlerSettings, NatsSettings
from postroom.worker.config import ConsumerConfig

ADVICE = ("declare one", "declare it", "lower max_bytes", "adapt the config", "no room", "would lose")


@contextmanager
def worker_in(directory: Path, database_url: str, nats_url: str) -> Iterator[Path]:
    """Run a worker that keeps three copies, and yield its log."""
    log = directory / "worker.log"
    environment = {
        "PATH": os.environ["PATH"],
        "POSTROOM_WORKER_DATABASE_URL": database_url,
        "POSTROOM_WORKER_NATS_URL": nats_url,
        "POSTROOM_WORKER_STREAM_DEFAULTS_REPLICAS": "3",
        "POSTROOM_WORKER_RECORD_CHECK_SECONDS": "0.5",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            tethered([sys.executable, "-m", "postroom.worker", "run"]), stderr=output, env=environment
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait()


@pytest.mark.parametrize(
    ("kills", "messages"), [(1, 200), pytest.param(3, 6000, marks=pytest.mark.soak)], ids=["a leader", "three leaders"]
)
async def test_what_is_sent_is_handled_once_while_leaders_are_killed(
    short_directory: Path, database_url: str, kills: int, messages: int
) -> None:
    await migrate(database_url)
    connection = await asyncpg.connect(database_url)
    await connection.execute("INSERT INTO mesh.mesh (slug) VALUES ('early')")
    async with running_cluster(short_directory) as (cluster, js), serving() as handler:
        with worker_in(short_directory, database_url, cluster.url) as log, quiet_logs():
            await until_so(lambda: _is_there(js, "EARLY_INBOX"))
            await connection.execute("INSERT INTO mesh.mesh (slug) VALUES ('late')")
            await until_so(lambda: _is_there(js, "LATE_EVENTS"))
            for stream in ("EARLY_EVENTS", "LATE_EVENTS"):
                assert (await js.stream_info(stream)).config.num_replicas == 3
            config = ConsumerConfig(
                context="late",
                database_url=database_url,
                nats=NatsSettings(url=cluster.url, reconnect_seconds=0.1),
                consumer=ConsumerSettings(stream="LATE_EVENTS", durable="late_orders", ack_wait_seconds=5),
                handler=HandlerSettings(url=handler.url, timeout_seconds=4),
            )
            async with consuming(config):
                sending = asyncio.create_task(_send(connection, messages))
                for number in range(kills):
                    leader = await cluster.leader_of(js, "LATE_EVENTS")
                    await until(lambda part=number + 1: handler.effects.total() > part * messages // (2 * kills + 1))  # type: ignore[misc]
                    cluster.kill(leader)
                    await until_so(lambda: _is_there(js, "LATE_EVENTS"))
                    cluster.start(leader)
                sent = await sending
                await until_so(lambda: _handled(handler.effects, sent), seconds=120)
            said = log.read_text()
    await connection.close()
    print(f"{len(sent)} sent, {handler.effects.total()} handled, {kills} leaders killed")  # noqa: T201
    assert set(handler.effects) == sent
    assert set(handler.effects.values()) == {1}
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [line for line in lines if any(advice in str(line) for advice in ADVICE)] == []


async def _send(connection: asyncpg.Connection[asyncpg.Record], messages: int) -> set[str]:
    """Emit 200 events a second; return their ids."""
    sent = set()
    for number in range(messages // 20):
        query = "SELECT postroom.emit('late', 'order', $1 || n::text, 'placed', '{}') FROM generate_series(1, 20) AS n"
        sent |= {str(row[0]) for row in await connection.fetch(query, f"{number}-")}
        await asyncio.sleep(0.1)
    return sent


async def _is_there(js: Any, stream: str) -> bool:
    try:
        await js.stream_info(stream)
    except Exception:  # noqa: BLE001 - not yet, or not at the moment
        return False
    return True


async def _handled(effects: Any, sent: set[str]) -> bool:
    return sent <= set(effects)
