"""Metrics in Prometheus' text format, from what one scrape found."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


def exposition(families: Iterable[Metric]) -> bytes:
    """Write `families`, each with its samples, as a scrape is answered."""
    registry = CollectorRegistry()
    registry.register(_Scrape(list(families)))
    return generate_latest(registry)


class _Scrape(Collector):
    """What one scrape found."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
