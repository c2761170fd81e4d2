"""Pauses and rates that operators set."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_client.pace import Controls, Rate
from outbox.model import ClaimedRow, RelayControl


def rows(*destinations: str) -> list[ClaimedRow]:
    return [ClaimedRow(f"row-{n}", f"id-{n}", b"", b"", to, 0, 0) for n, to in enumerate(destinations)]


def test_a_rate_lets_a_portion_go_once_it_has_gathered():
    rate = Rate(50, 0.1, now_ms=0)
    assert rate.allowance(0) == 0
    assert rate.wait_seconds(0) == pytest.approx(0.1)
    assert rate.allowance(99) == 0
    assert rate.allowance(100) == 5
    rate.take(5)
    assert rate.allowance(100) == 0


def test_a_quiet_hour_saves_up_one_portion_only():
    rate = Rate(50, 0.1, now_ms=0)
    assert rate.allowance(3_600_000) == 5


def test_a_rate_below_one_a_second_still_lets_one_message_go():
    rate = Rate(0.2, 0.1, now_ms=0)
    assert rate.allowance(4_900) == 0
    assert rate.allowance(5_000) == 1


def test_a_clock_that_goes_back_gives_nothing_away():
    rate = Rate(10, 1, now_ms=10_000)
    assert rate.allowance(0) == 0
    assert rate.allowance(1_000) == 10


@given(
    per_second=st.floats(0.01, 5000),
    steps=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 700)), min_size=1, max_size=60),
)
def test_never_more_messages_go_than_the_rate_allows(per_second, steps):
    rate, now, gone = Rate(per_second, 0.1, now_ms=0), 0, 0
    for passed, wanted in steps:
        now += passed
        count = min(wanted, rate.allowance(now))
        rate.take(count)
        gone += count
    assert gone <= per_second * now / 1000 + 1e-6


def test_without_controls_everything_goes():
    controls = Controls()
    assert not controls.paused
    assert controls.allowance(500, 0) == 500
    assert controls.excluded(0) == []
    assert controls.wait_seconds(0) == math.inf
    assert controls.admit(rows("topic:a"), 0) == (rows("topic:a"), [])


def test_a_paused_destination_is_excluded_and_named():
    controls = Controls({"topic:a": RelayControl(paused=True), "topic:b": RelayControl(paused=False)})
    assert controls.excluded(0) == controls.paused_destinations == ["topic:a"]
    assert not controls.paused


def test_a_pause_of_everything_pauses():
    assert Controls({"": RelayControl(paused=True)}).paused


def test_a_rate_of_everything_bounds_each_claim():
    controls = Controls({"": RelayControl(paused=False, rate_per_second=100)}, 0)
    assert controls.rate_per_second == 100
    assert controls.allowance(500, 0) == 0
    assert controls.wait_seconds(0) == pytest.approx(0.1)
    assert controls.allowance(500, 100) == 10
    controls.admit(rows(*["topic:a"] * 10), 100)
    assert controls.allowance(500, 100) == 0


def test_a_rate_of_one_destination_splits_a_claim():
    controls = Controls({"topic:a": RelayControl(paused=False, rate_per_second=2)}, 0)
    assert controls.excluded(0) == ["topic:a"]
    assert controls.excluded(1000) == []
    mixed = rows("topic:a", "topic:b", "topic:a", "topic:a")
    assert controls.admit(mixed, 1000) == (mixed[:3], mixed[3:])
    assert controls.excluded(1000) == ["topic:a"]
    assert controls.wait_seconds(1000) == pytest.approx(1)
