"""A publisher is killed before and after every step: each event is in the stream once, none is missing."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, defaultdict
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support import crashing_publisher

from embedded.processes import tethered

ONCE = ["Streams.refresh", "Record.compare"]
BATCHES = ["Publisher.connected", "Publisher.publish", "Link.publish", "PostgresClaim.settle", "Publisher.step"]
MESSAGES = ["NatsClient.publish", "Link._acknowledged"]  # 20 of each at least
POINTS = [
    *product(ONCE, ("before", "after"), (1,)),
    *product(BATCHES, ("before", "after"), (1, 2, 3)),
    *product(MESSAGES, ("before", "after"), range(1, 21)),
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


def by_aggregate(ids: list[str], aggregate_of: dict[str, str]) -> dict[str, list[str]]:
    sorted_out: dict[str, list[str]] = defaultdict(list)
    for identity in ids:
        sorted_out[aggregate_of[identity]].append(identity)
    return sorted_out
