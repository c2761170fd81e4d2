"""The breaker gives a failing Redis a rest, and lets one caller at a time try again."""

from __future__ import annotations

import pytest

from broker.limiter import Breaker


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(failures=3, rest_seconds=2.0, monotonic=clock)


def test_a_few_failures_are_borne(breaker: Breaker) -> None:
    breaker.failed()
    breaker.failed()

    assert breaker.may_try()
    assert breaker.failing


def test_too_many_in_a_row_begin_a_rest(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed()

    assert not breaker.may_try()
    clock.now = 1.9
    assert not breaker.may_try()


def test_after_the_rest_one_caller_tries_and_the_others_wait_for_it(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed()
    clock.now = 2.0

    assert [breaker.may_try() for _ in range(3)] == [True, False, False]
    breaker.failed()
    clock.now = 3.9
    assert not breaker.may_try()


def test_an_answer_ends_it_all(breaker: Breaker, clock: Clock) -> None:
    for _ in range(3):
        breaker.failed()
    clock.now = 2.0
    breaker.may_try()
    breaker.succeeded()

    assert [breaker.may_try() for _ in range(3)] == [True, True, True]
    assert not breaker.failing
