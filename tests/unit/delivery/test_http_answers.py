"""The answer table as a pure function: every status, first and last."""

from __future__ import annotations

import pytest

from postroom.delivery.http.client import Answer, State, judge

NO_ANSWER = Answer(None, "handler_timed_out", "20 s")


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("status", [*range(200, 300), 409])
def test_success_and_409_are_processed(status: int, last: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert judge(Answer(status, "", ""), last=last).state is State.PROCESSED


@pytest.mark.parametrize("last", [False, True])
def test_422_is_dead(last: bool) -> None:  # noqa: FBT001
    judgement = judge(Answer(422, "http_422", "no such order"), last=last)

    assert (judgement.state, judgement.reason, judgement.error) == (State.DEAD, "poison", "http_422: no such order")


@pytest.mark.parametrize("status", [*range(300, 409), *range(410, 422), *range(423, 600), None])
def test_everything_else_waits_for_the_next_attempt_and_is_dead_after_the_last(status: int | None) -> None:
    answer = Answer(status, f"http_{status}", "", retry_after=7.0)

    first, last = judge(answer, last=False), judge(answer, last=True)
    assert (first.state, first.error, first.after) == (State.FAILED, f"http_{status}", 7.0)
    assert (last.state, last.reason, last.error) == (State.DEAD, "max_deliver", f"http_{status}")


def test_an_error_is_a_code_and_a_sentence() -> None:
    assert NO_ANSWER.error == "handler_timed_out: 20 s"
