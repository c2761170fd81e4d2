"""A consumer's metrics: `postroom_consumer_<what>_<unit>` (docs/contract/operate.md#operate-31)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import fields
from itertools import accumulate
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from postroom.chassis.routes import exposition
from postroom.delivery.consumer import ConsumerCounters
from postroom.delivery.http.handler import CALL_BOUNDS, HandlerCounters, HttpHandler, Reach
from postroom.delivery.http.inbox_messages import Backlog

PREFIX: Final = "postroom_consumer_"


def expose(consumer: ConsumerCounters, handler: HttpHandler, in_hand: int, backlog: Backlog | None) -> bytes:
    """Return every metric in Prometheus' text format; without a backlog where Postgres could not tell it."""
    return exposition(
        [*_consumer(consumer, in_hand), *_handler(handler.counters), *_reach(handler.reach), *_backlog(backlog)]
    )


def _consumer(counters: ConsumerCounters, in_hand: int) -> Iterator[Metric]:
    deliveries = CounterMetricFamily(
        f"{PREFIX}deliveries", "Deliveries by outcome, since the start", labels=["outcome"]
    )
    for field in fields(counters):
        deliveries.add_metric([field.name], getattr(counters, field.name))
    yield deliveries
    yield GaugeMetricFamily(f"{PREFIX}in_hand", "Messages claimed", in_hand)


def _handler(counters: HandlerCounters) -> Iterator[Metric]:
    calls = CounterMetricFamily(f"{PREFIX}calls", "Calls of the handler by its answer", labels=["answer"])
    for answer, count in counters.answers.items():
        calls.add_metric([answer], count)
    yield calls
    buckets = list(zip([*map(str, CALL_BOUNDS), "+Inf"], accumulate(counters.call_counts), strict=True))
    yield HistogramMetricFamily(
        f"{PREFIX}call_seconds", "Time of a call", buckets=buckets, sum_value=counters.call_seconds
    )
    yield GaugeMetricFamily(f"{PREFIX}calls_under_way", "Calls running", counters.calls_under_way)
    for name, what, value in (
        ("duplicates", "Deliveries of messages that were processed before", counters.duplicates),
        ("malformed", "Messages that could not become a request", counters.malformed),
        ("held", "Deliveries of messages that another consumer was handling", counters.held),
        ("leases_lost", "Attempts that ended without their lease", counters.leases_lost),
    ):
        yield CounterMetricFamily(PREFIX + name, what, value)


def _reach(reach: Reach) -> Iterator[Metric]:
    there = float(reach.error is None)
    yield GaugeMetricFamily(
        f"{PREFIX}handler_reachable", "0 while calls pause because the handler is unreachable", there
    )
    yield GaugeMetricFamily(
        f"{PREFIX}handler_away_seconds", "How long the handler has been unreachable", reach.away_seconds
    )


def _backlog(backlog: Backlog | None) -> Iterator[Metric]:
    if backlog is None:
        return
    oldest = 0.0 if backlog.oldest_at is None else max(0.0, time.time() - backlog.oldest_at.timestamp())
    yield GaugeMetricFamily(f"{PREFIX}backlog_messages", "Messages neither processed nor dead", backlog.messages)
    yield GaugeMetricFamily(f"{PREFIX}backlog_oldest_seconds", "Age of the oldest of them", oldest)
