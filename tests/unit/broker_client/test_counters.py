from __future__ import annotations

from broker_client import RelayCounters
from broker_client.answers import Outcome


def test_a_post_is_counted_as_a_batch_and_as_attempts_and_by_its_length():
    counters = RelayCounters()
    counters.batch("answered", [Outcome.ACCEPTED, Outcome.ACCEPTED, Outcome.REJECTED], 0.02)
    counters.batch("broker_failed", [Outcome.RETURNED], 3600)
    assert counters.attempts["accepted"] == 2
    assert counters.attempts["rejected"] == counters.attempts["returned"] == 1
    assert counters.batches == {"answered": 1, "broker_failed": 1}
    assert counters.latency.counts[counters.latency.bounds.index(0.025)] == 1
    assert counters.latency.counts[-1] == 1
    assert sum(counters.latency.counts) == 2
    assert counters.latency.total == 3600.02


def test_every_outcome_is_there_from_the_start():
    assert set(RelayCounters().attempts) == {outcome.value for outcome in Outcome}
