"""Relaying: 100,000 rows from one daemon through one broker into Postgres, beside the broker's own batch rate."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Final

from bench.accept import batches, post
from bench.mailroom import broker
from bench.processes import Daemon, daemon
from bench.report import Measured, Ratio, judge, show
from bench.send import STREAMS, stream
from postroom import AsyncClient

ROWS: Final = 100_000
_GOAL: Final = 0.5
_POLL_SECONDS: Final = 0.1


def relay(directory: Path, runs: int, seconds: float) -> None:
    """Measure the drain; `seconds` has no meaning here, a run is so many rows."""
    del seconds
    asyncio.run(_relay(directory, runs))


async def _relay(directory: Path, runs: int) -> None:
    drained, posted = [], []
    for run in range(runs):
        async with broker(directory / f"broker-{run}") as running:
            posted.append(await post(running, batches(f"p{run}"), expected=201))
            with daemon(directory / f"daemon-{run}", broker=running.url, token=running.token) as daemon_:
                drained.append(await _drain(daemon_))
    print(f"relay, {ROWS:,} rows to done")
    show(Measured("daemon to broker to Postgres", drained))
    show(Measured("the broker's own batch rate", posted))
    judge(Ratio("of the broker's rate", list(zip(drained, posted, strict=True)), _GOAL))


async def _drain(daemon_: Daemon) -> float:
    """Fill a paused outbox, resume, and time it until every row is done; rows a second."""
    async with AsyncClient(daemon_.socket) as client:
        await client.pause_relay(reason="fill the outbox first")
        stream(daemon_, first=0, lines=ROWS // STREAMS)
        await client.resume_relay(reason="the outbox is full")
        began = time.perf_counter()
        while (await client.health()).rows["done"] < ROWS:  # noqa: ASYNC110 - the daemon is another process
            await asyncio.sleep(_POLL_SECONDS)
        return ROWS / (time.perf_counter() - began)
