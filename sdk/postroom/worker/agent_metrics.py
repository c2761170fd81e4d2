"""An agent's metrics: `postroom_agent_<what>` (docs/contract/operate.md#operate-31); no label names a message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from postroom.chassis.routes import exposition
from postroom.delivery.agents.counters import AgentCounters
from postroom.delivery.agents.runtime import AgentRuntime
from postroom.delivery.consumer import ConsumerCounters

PREFIX: Final = "postroom_agent_"


def expose(runtime: AgentRuntime, consumers: Sequence[ConsumerCounters]) -> bytes:
    """Return every metric in Prometheus' text format."""
    return exposition([*_agent(runtime.counters, runtime.position), *_consumers(consumers)])


def _agent(counters: AgentCounters, position: int) -> Iterator[Metric]:
    messages = CounterMetricFamily(
        f"{PREFIX}messages", "Messages that the agent handled and emitted, by outcome.", labels=["what"]
    )
    for what, count in asdict(counters).items():
        messages.add_metric([what], count)
    yield messages
    yield GaugeMetricFamily(f"{PREFIX}position", "The last position of the event store.", value=position)


def _consumers(consumers: Sequence[ConsumerCounters]) -> Iterator[Metric]:
    deliveries = CounterMetricFamily(
        f"{PREFIX}deliveries", "Deliveries by outcome; delivered counts all.", labels=["what"]
    )
    for what in ConsumerCounters.__slots__:
        deliveries.add_metric([what], sum(getattr(counters, what) for counters in consumers))
    yield deliveries
