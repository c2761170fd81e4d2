"""A peer: NATS JetStream with `sync_interval: always`, publishing 1 KiB messages from nats-py, 64 at once."""

from __future__ import annotations

import asyncio
import time
from typing import Final

import nats
from nats.js import JetStreamContext

from bench.load import message

_SUBJECT: Final = "bench.event.order.v1"


async def publishes_per_second(url: str, *, at_once: int, seconds: float) -> float:
    """Publish with `at_once` publishers, each waiting for its acknowledgement, for `seconds`."""
    connection = await nats.connect(url)
    stream = connection.jetstream()
    await stream.add_stream(name="BENCH", subjects=[_SUBJECT])
    deadline = time.perf_counter() + seconds
    began = time.perf_counter()
    counts = await asyncio.gather(*(_publish_until(stream, deadline) for _ in range(at_once)))
    took = time.perf_counter() - began
    await connection.close()
    return sum(counts) / took


async def _publish_until(stream: JetStreamContext, deadline: float) -> int:
    payload, published = message(), 0
    while time.perf_counter() < deadline:
        await stream.publish(_SUBJECT, payload)
        published += 1
    return published
