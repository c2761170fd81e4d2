"""A benchmark still finds what it reads of other programs, which no type checker sees: a void run shows it here."""

import pytest

from bench import __main__ as bench
from bench import jobs, way

SCALES = {  # the least at which there is something left to measure; what is not here reads what one of these does
    "send": 0.01,
    "batch": 0.01,
    "accept": 0.01,
    "full": 0.01,
    "publish": 0.01,
    "consume": 0.05,
    "agent": 0.05,
    "jobs": 0.3,
    "idle": 0.01,
    "console": 0.01,
}


@pytest.mark.parametrize("name", SCALES)
def test_a_benchmark_finds_what_it_measures(name, monkeypatch):
    monkeypatch.setattr(way, "SYSTEMS", {"Postroom": way.SYSTEMS["Postroom"]})
    monkeypatch.setattr(jobs, "PEERS", ())
    results = bench.measure(name, 1, SCALES[name])
    assert results.void is None
