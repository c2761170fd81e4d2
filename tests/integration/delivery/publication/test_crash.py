"""A publisher is killed before and after every step: each event is in the stream once, none is missing."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from support import crashing_publisher
from support.jetstream import with_jetstream
from support.waiting import until_so

from embedded import EmbeddedNats
from embedded.processes import tethered
from postroom.delivery.settings import PublisherSettings

ONCE = ["Streams.refresh", "Record.compare"]
BATCHES = ["Publisher.connected", "Publisher.publish", "Link.publish", "PostgresClaim.settle", "Publisher.step"]
MESSAGES = ["NatsClient.publish", "Link._acknowledged"]  # 20 of each at least, 8 in a batch
POINTS = [
    *product(ONCE, ("before", "after"), (1,)),
    *product(BATCHES, ("before", "after"), (1, 2, 3)),
    *product(MESSAGES, ("before", "after"), (1, 2, 7, 8, 9, 16, 17, 20)),
]
ATOMIC = [
    *product(BATCHES, ("before", "after"), (1, 2)),
    *product(["Link._send"], ("before", "after"), (1, 2)),
    *product(["NatsClient.publish"], ("before", "after"), (1, 2, 20, 39, 40, 41, 60, 80)),
    *product(["Link._acknowledged"], ("before", "after"), (1, 2)),
]


@pytest.mark.parametrize(
    ("points", "size"), [(POINTS, (20, 8)), (ATOMIC, (80, 40))], ids=["one by one", "atomic batches"]
)
async def test_a_publisher_killed_anywhere_loses_and_repeats_nothing(
    office: Any, nats_url: str, database_url: str, points: list[tuple[str, str, int]], size: tuple[int, int]
) -> None:
    await office.add_stream()
    events, batch = size
    arguments = [database_url, nats_url, office.context, str(events), str(batch)]
    process = await asyncio.create_subprocess_exec(
        *tethered([sys.executable, crashing_publisher.__file__, *arguments]),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={"PYTHONPATH": f"{Path.cwd()}:{Path.cwd() / 'sdk'}"},
    )
    lines = [f"{call} {when} {nth}\n" for call, when, nth in points] + ["Publisher.step before 1000000\n"]
    said, _ = await process.communicate("".join(lines).encode())
    *ends, last = said.decode().splitlines()

    assert (set(ends), len(ends), last) == ({"killed"}, len(points), "drained 0")
    rows = await office.pool.fetch("SELECT id::text, aggregate_id FROM postroom.outbox_events ORDER BY position")
    assert len(rows) == events * len(lines)
    ids = await office.ids()
    assert Counter(ids) == Counter(row[0] for row in rows)
    aggregate_of = {row[0]: row[1] for row in rows}
    assert by_aggregate(ids, aggregate_of) == by_aggregate([row[0] for row in rows], aggregate_of)


async def test_a_server_killed_amid_atomic_batches_loses_repeats_and_reorders_nothing(
    office: Any, running: Any, short_directory: Path
) -> None:
    async def messages(js: JetStreamContext) -> int:
        return int((await js.stream_info(office.stream)).state.messages)

    server = EmbeddedNats(short_directory / "nats")
    server.start()
    await with_jetstream(server, lambda js: replace(office, js=js).add_stream())
    publisher = office.publisher(PublisherSettings(batch=200, ack_seconds=1, most_seconds=0.05), url=server.url)
    async with running(publisher):
        for kill in range(5):
            await office.emit_many(1500, aggregates=7)
            await until_so(partial(with_jetstream, server, messages), holds=(kill * 1500).__lt__)
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGKILL)
            server.stop()
            server.start()
        await asyncio.wait_for(office.drained(), 60)
    ids = await with_jetstream(server, lambda js: replace(office, js=js).ids())
    server.stop()

    rows = await office.pool.fetch("SELECT id::text, aggregate_id FROM postroom.outbox_events ORDER BY position")
    assert Counter(ids) == Counter(row[0] for row in rows)
    aggregate_of = {row[0]: row[1] for row in rows}
    assert by_aggregate(ids, aggregate_of) == by_aggregate([row[0] for row in rows], aggregate_of)


def by_aggregate(ids: list[str], aggregate_of: dict[str, str]) -> dict[str, list[str]]:
    sorted_out: dict[str, list[str]] = defaultdict(list)
    for identity in ids:
        sorted_out[aggregate_of[identity]].append(identity)
    return sorted_out
