"""The breaker gives a failing Redis, or NATS, a rest, and lets one caller at a time try again."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.limiter import Breaker
from broker.operator import BRIEFLY, PATIENCE, Nats
from postroom.delivery.settings import NatsSettings
from postroom.errors import Unavailable


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


async def test_a_nats_that_did_not_answer_is_soon_asked_again_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[float]()

    async def refuse(*_: object, patience: float, **__: object) -> None:
        waited.append(patience)
        raise Unavailable.of("nats_unreachable", "no")

    monkeypatch.setattr("broker.operator.connect", refuse)
    nats = Nats(NatsSettings(url="nats://127.0.0.1:1"))
    for _ in range(3):  # the pages of a long list
        async with nats.opened(PATIENCE) as (js, unread):
            assert (js, unread is None) == (None, False)

    assert waited == [PATIENCE, BRIEFLY, BRIEFLY]


@pytest.mark.parametrize("setting", ["ca_file", "credentials_file"])
async def test_a_file_that_nats_needs_and_that_cannot_be_read_is_named(setting: str) -> None:
    nats = Nats(NatsSettings(url="nats://127.0.0.1:1", **{setting: Path("/nowhere")}))
    async with nats.opened(BRIEFLY) as (js, unread):
        assert unread is not None
        assert (js, unread.code, unread.retryable) == (None, "nats_unreachable", False)
        assert "/nowhere: No such file or directory" in unread.detail
