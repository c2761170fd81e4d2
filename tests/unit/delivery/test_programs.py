"""What a worker counts of how long messages took: by bounds that every report has room for."""

from __future__ import annotations

import msgspec

from postroom._wire.programs import LATENCIES, Report
from postroom.chassis.routes import Histogram
from postroom.delivery.programs import latency_totals


def test_latencies_are_counted_by_the_bound_that_they_do_not_exceed() -> None:
    some, others = Histogram(LATENCIES), Histogram(LATENCIES)
    for seconds in (0.0, 0.005, 0.02, 3600.0):
        some.observe(seconds)
    others.observe(3600.1)
    found = {name: count for name, count in latency_totals(some, others).items() if count}
    assert found == {"handled_in_0": 2, "handled_in_2": 1, "handled_in_14": 1, "handled_in_15": 1}


def test_a_report_has_room_for_all_that_a_worker_counts() -> None:
    now = "2026-01-31T12:00:00Z"
    said = {"host": "red", "pid": 1, "version": "1", "started_at": now, "at": now, "status": "ok"}
    totals = {"published": 1, "handled": 1, "dead_lettered": 1, **latency_totals(Histogram(LATENCIES))}
    assert msgspec.convert({**said, "totals": totals}, Report).totals == totals
