"""What the relay does with a whole request that failed (docs/contract/send.md#send-62 and further)."""

from __future__ import annotations

from random import Random

import pytest

from broker_client.answers import REACTIONS, Reaction, pause_seconds
from broker_client.channel import Failure, RequestFailed
from broker_client.link import failure_of
from broker_client.pace import Availability
from broker_client.settings import RelaySettings


class Highest(Random):
    def random(self) -> float:
        return 1.0


def failed(failure: Failure, retry_after: float | None = None) -> RequestFailed:
    return RequestFailed.because(failure, "why", retry_after)


def test_every_failure_has_its_reaction():
    assert set(REACTIONS) == set(Failure)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_token_makes_health_degraded_and_suspects_no_message(status):
    assert failure_of(status) is Failure.NOT_PERMITTED
    assert REACTIONS[failure_of(status)] == Reaction(degraded=True, recheck=True, untaken=True)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 400, 413, 422, 301, 302, 307, 204])
def test_a_batch_is_suspected_where_it_may_be_the_cause(status):
    reaction = REACTIONS[failure_of(status)]
    assert reaction.suspicious
    assert not reaction.degraded


def test_a_broker_that_was_never_reached_says_nothing_about_the_batch():
    assert REACTIONS[Failure.UNREACHABLE] == Reaction(recheck=True, untaken=True)


@pytest.mark.parametrize(("status", "code"), [(429, ""), (429, "rate_limited"), (503, "overloaded")])
def test_a_busy_broker_says_nothing_about_the_batch(status, code):
    assert REACTIONS[failure_of(status, code)] == Reaction(busy=True, untaken=True)


def test_a_503_of_anybody_else_is_an_outage():
    assert not REACTIONS[failure_of(503, "database_unavailable")].busy
    assert not REACTIONS[failure_of(500, "overloaded")].busy


@pytest.mark.parametrize(("failures", "seconds"), [(1, 0.5), (2, 1), (3, 2), (7, 32), (8, 60), (1000, 60)])
def test_the_pause_doubles_to_a_minute(failures, seconds):
    assert pause_seconds(failed(Failure.TIMED_OUT), failures, Highest(), RelaySettings()) == seconds


def test_the_pause_is_at_least_what_the_broker_asked_for():
    assert pause_seconds(failed(Failure.SERVER_ERROR, 120), 1, Highest(), RelaySettings()) == 120


def availability() -> Availability:
    return Availability(RelaySettings(), Highest())


def test_posts_of_one_round_that_fail_together_count_as_one_failure():
    state = availability()
    for _ in range(4):
        state.failed(failed(Failure.BROKEN_OFF), 0, 1000)
    assert (state.failures, state.resume_at) == (1, 1500)


def test_each_further_failure_makes_the_pause_longer():
    state = availability()
    for _ in range(3):
        state.failed(failed(Failure.BROKEN_OFF), state.pauses, 1000)
    assert (state.failures, state.resume_at) == (3, 3000)
    assert state.probing


def test_an_answer_ends_the_pause_and_the_degradation():
    state = availability()
    state.failed(failed(Failure.NOT_PERMITTED), 0, 1000)
    assert (state.degraded, state.reason) == (True, "why")
    state.succeeded(0, 1100)
    assert (state.degraded, state.reason, state.resume_at, state.probing) == (False, None, 0, False)


@pytest.mark.parametrize(("asked", "least", "most"), [(None, 1, 2), (1, 1, 2), (30, 30, 60), (600, 600, 900)])
def test_what_a_busy_broker_asks_for_is_spread_and_never_cut_short(asked, least, most):
    pauses = [pause_seconds(failed(Failure.OVERLOADED, asked), 0, Random(n), RelaySettings()) for n in range(200)]
    assert least <= min(pauses) < least * 1.1
    assert most * 0.9 < max(pauses) <= most


def test_a_busy_broker_gets_half_as_many_posts_and_then_one_more_for_each_round_it_answers():
    state = Availability(RelaySettings(posts_at_once=8), Highest())
    slots = []
    for _ in range(5):
        state.failed(failed(Failure.OVERLOADED, 1), state.pauses, 1000)
        slots.append(state.slots)
    assert slots == [4, 2, 1, 1, 1]
    assert not state.probing
    answered = []
    while state.slots < 8:
        state.succeeded(state.pauses, 9000)
        answered.append(state.slots)
    assert answered == [2, 2, 3, 3, 3, 4, *[4] * 3, 5, *[5] * 4, 6, *[6] * 5, 7, *[7] * 6, 8]


def test_posts_that_a_busy_broker_turns_away_together_halve_once():
    state = Availability(RelaySettings(posts_at_once=8), Highest())
    for _ in range(8):
        state.failed(failed(Failure.OVERLOADED, 1), 0, 1000)
    assert (state.slots, state.pause_left(1000)) == (4, 2)


def test_a_post_that_was_under_way_and_is_answered_does_not_end_the_wait_that_a_busy_broker_asked_for():
    state = availability()
    state.failed(failed(Failure.OVERLOADED, 30), 0, 1000)
    state.succeeded(0, 1100)
    assert (state.pause_left(1100), state.slots) == (59.9, 2)


def test_a_busy_broker_ends_an_outage():
    state = availability()
    state.failed(failed(Failure.UNREACHABLE), 0, 1000)
    state.failed(failed(Failure.OVERLOADED, 1), state.pauses, 2000)
    assert not state.probing


def test_a_broker_that_was_not_reached_for_half_a_minute_makes_an_outage():
    state = availability()
    state.failed(failed(Failure.UNREACHABLE), 0, 1000)
    assert [state.is_outage(now) for now in (30_999, 31_000)] == [False, True]


def test_an_exhausted_limit_pauses_without_a_failure():
    state = availability()
    state.rest(20, 1000)
    assert (state.failures, state.resume_at, state.degraded) == (0, 21_000, False)


def test_a_clock_that_is_set_back_ends_the_pause_instead_of_making_it_longer():
    state = availability()
    state.rest(20, 1_000_000)
    assert state.pause_left(1_005_000) == 15
    assert state.pause_left(1_000_000 - 3_600_000) == 0
