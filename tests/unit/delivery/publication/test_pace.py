"""A publisher looks often while something comes, and seldom when nothing does."""

from __future__ import annotations

import pytest

from postroom.delivery.publication.publisher import Pace


def test_before_anything_came_it_rests_longest() -> None:
    assert Pace(0.05).rest(100.0, moved=False) == 0.05


def test_what_comes_every_few_milliseconds_is_looked_for_as_often() -> None:
    pace = Pace(1.0)
    pace.rest(100.0, moved=True)
    assert [pace.rest(100.0 + gap, moved=False) for gap in (0.001, 0.003, 0.05)] == [0.05] * 3


def test_a_rest_grows_with_the_silence_up_to_the_longest() -> None:
    pace = Pace(1.0)
    pace.rest(100.0, moved=True)
    assert pace.rest(100.25, moved=False) == pytest.approx(0.25)
    assert pace.rest(102.0, moved=False) == 1.0


def test_a_shorter_limit_than_the_shortest_rest_holds() -> None:
    assert Pace(0.001).rest(100.0, moved=True) == 0.001
