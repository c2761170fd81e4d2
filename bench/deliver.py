"""Delivering: the publisher beside nats-py, a consumer with a handler behind HTTP, an agent, and the whole way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from statistics import median
from typing import Final

from bench.delivering import agent_rate, consumer_rate, publisher_rates
from bench.report import Floor, Limit, Measured, Ratio, judge, judge_floor, judge_limit, show
from bench.way import RATE, STAGES, travel

_PUBLISHER_GOAL: Final = 0.5
_CONSUMER_GOAL: Final = 2000.0
_AGENT_GOAL: Final = 3000.0
_P50_GOAL: Final = 30.0  # ms
_P99_GOAL: Final = 150.0  # ms


def publish(directory: Path, runs: int, seconds: float) -> None:
    """Measure the worker; `seconds` has no meaning here, a run is so many messages."""
    del seconds
    pairs = [asyncio.run(publisher_rates(directory / f"publisher-{run}")) for run in range(runs)]
    print("the publisher, a backlog of events of 100 aggregates")
    show(Measured("postroom worker run", [ours for ours, _ in pairs]))
    show(Measured("nats-py, pipelined", [theirs for _, theirs in pairs]))
    judge(Ratio("of nats-py", pairs, _PUBLISHER_GOAL))


def handle(directory: Path, runs: int, seconds: float) -> None:
    """Measure the consumer and the agent; `seconds` has no meaning here either."""
    del seconds
    consumed = [asyncio.run(consumer_rate(directory / f"consumer-{run}")) for run in range(runs)]
    handled = [asyncio.run(agent_rate(directory / f"agent-{run}")) for run in range(runs)]
    print("handlers that do nothing")
    judge_floor(Floor("postroom consumer run, aiohttp", consumed, _CONSUMER_GOAL))
    judge_floor(Floor("postroom agent run", handled, _AGENT_GOAL))


def deliver(directory: Path, runs: int, seconds: float) -> None:
    """Send at a steady rate through daemon, broker, worker and consumer to a handler, everything on these cores."""
    trips = [asyncio.run(travel(directory / f"way-{run}", seconds)) for run in range(runs)]
    print(f"the whole way, {RATE} sends a second")
    for stage in STAGES:
        p50, p99 = (median(trip[stage][which] for trip in trips) * 1e3 for which in (0, 1))
        whole = stage == STAGES[-1]
        judge_limit(Limit(f"{stage}, p50", p50, "ms", _P50_GOAL if whole else None))
        judge_limit(Limit(f"{stage}, p99", p99, "ms", _P99_GOAL if whole else None))
