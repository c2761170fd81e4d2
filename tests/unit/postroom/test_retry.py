from __future__ import annotations

import pytest

from postroom._wire.retry import CLIENT, STEADY, Backoff, Patience, retrying, retrying_unless_arrived
from postroom.errors import Conflict, PostroomError, TryAgain, Unavailable

LOST = Unavailable.of("connection_lost", "broken", retryable=True)
ABSENT = Unavailable.of("daemon_absent", "nobody", retryable=True)
TAKEN = Conflict.of("idempotency_key_reused", "taken")


class Clock:
    """A clock that only a pause moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


def patience(clock: Clock, seconds: float, chance: float = 1.0) -> Patience:
    return Patience(seconds, clock=clock, sleep=clock.sleep, chance=lambda: chance)


class Attempts:
    """Fails with each of `errors` in turn, then succeeds."""

    def __init__(self, *errors: PostroomError) -> None:
        self.errors = list(errors)
        self.count = 0

    async def __call__(self) -> str:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.mark.parametrize(
    ("backoff", "failures", "seconds"),
    [
        (Backoff(1, 20, factor=3), [1, 2, 3, 4, 5_000], [(0, 1), (0, 3), (0, 9), (0, 20), (0, 20)]),
        (Backoff(1, 20, factor=100, least=STEADY), [1, 2, 10**18], [(0.8, 1), (16, 20), (16, 20)]),
        (Backoff(5, 1), [0, 1, 2], [(0, 1)] * 3),
    ],
)
def test_a_pause_grows_by_its_factor_up_to_the_most_and_is_drawn_up_to_there(
    backoff: Backoff, failures: list[int], seconds: list[tuple[float, float]]
) -> None:
    assert [(backoff.seconds(each, lambda: 0.0), backoff.seconds(each, lambda: 1.0)) for each in failures] == seconds


async def test_pauses_double_up_to_the_longest() -> None:
    clock = Clock()
    assert await retrying(Attempts(*[LOST] * 12), patience(clock, 1000)) == "done"
    assert clock.pauses[:4] == [0.05, 0.1, 0.2, 0.4]
    assert clock.pauses[-1] == max(clock.pauses) == CLIENT.most


async def test_jitter_is_full() -> None:
    clock = Clock()
    await retrying(Attempts(LOST), patience(clock, 10, chance=0.0))
    assert clock.pauses == [0.0]


async def test_retry_after_is_waited_for() -> None:
    clock = Clock()
    busy = TryAgain.of("busy", "later", retryable=True, retry_after=7.0)
    await retrying(Attempts(busy), patience(clock, 10))
    assert clock.pauses == [7.0]


async def test_the_deadline_ends_it_with_the_last_error() -> None:
    clock = Clock()
    attempts = Attempts(*[LOST] * 1000)
    with pytest.raises(Unavailable):
        await retrying(attempts, patience(clock, 3))
    assert clock.now < 3


async def test_without_patience_there_is_one_try() -> None:
    attempts = Attempts(LOST)
    with pytest.raises(Unavailable):
        await retrying(attempts, patience(Clock(), 0))
    assert attempts.count == 1


async def test_what_is_not_retryable_ends_at_once() -> None:
    attempts = Attempts(TAKEN)
    with pytest.raises(Conflict):
        await retrying(attempts, patience(Clock(), 100))
    assert attempts.count == 1


async def test_progress_starts_the_time_anew() -> None:
    clock = Clock()
    waiting = patience(clock, 1)
    for _ in range(20):
        await waiting.pause(LOST)
        waiting.restart()
    assert clock.pauses == [0.05] * 20


@pytest.mark.parametrize("error", [LOST, TryAgain.of("outcome_unknown", "?", retryable=True, retry_after=1.0), TAKEN])
async def test_a_change_that_may_have_happened_is_tried_once(error: PostroomError) -> None:
    attempts = Attempts(error)
    with pytest.raises(PostroomError):
        await retrying_unless_arrived(attempts, patience(Clock(), 100))
    assert attempts.count == 1


@pytest.mark.parametrize("error", [ABSENT, TryAgain.of("busy", "later", retryable=True, retry_after=1.0)])
async def test_a_change_that_surely_did_not_happen_is_tried_again(error: PostroomError) -> None:
    attempts = Attempts(error)
    assert await retrying_unless_arrived(attempts, patience(Clock(), 100)) == "done"
    assert attempts.count == 2
