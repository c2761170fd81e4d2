"""What `delivery-report` measures, and its picture shows."""

from __future__ import annotations

from typing import NamedTuple


class Latency(NamedTuple):
    """What one day's deliveries to one destination took; percentiles in milliseconds."""

    mesh: str
    to: str
    stage: str
    day: str
    deliveries: int
    p50: float
    p90: float
    p99: float
