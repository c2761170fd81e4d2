"""The answer table as a pure function: every status, first and last."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from postroom._wire.retry import Backoff
from postroom.claims import DONE, Dead, Later, Outcome
from postroom.delivery.consumer import Attempts
from postroom.delivery.http.client import Answer, judge
from postroom.delivery.message import Delivery

NO_ANSWER = Answer(None, "handler_timed_out", "20 s")


def judged(answer: Answer, *, last: bool) -> Outcome:
    """Return what becomes of the message after the second attempt, of two or of three."""
    delivery = Delivery("sea.event.x.v1", b"{}", {}, "m-1", "SEA_EVENTS", 7, 1, datetime.now(UTC))
    return judge(answer, delivery, 2, Attempts(2 if last else 3, Backoff(4, 4, least=1)))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("status", [*range(200, 300), 409])
def test_success_and_409_are_done(status: int, last: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert judged(Answer(status, "", ""), last=last) is DONE


@pytest.mark.parametrize("last", [False, True])
def test_422_is_dead(last: bool) -> None:  # noqa: FBT001
    assert judged(Answer(422, "http_422", "no such order"), last=last) == Dead("poison", "http_422: no such order", 2)


@pytest.mark.parametrize("status", [*range(300, 409), *range(410, 422), *range(423, 600), None])
def test_everything_else_waits_for_the_next_attempt_and_is_dead_after_the_last(status: int | None) -> None:
    answer = Answer(status, f"http_{status}", "")
    assert judged(answer, last=False) == Later(f"http_{status}", 4)
    assert judged(answer._replace(retry_after=7.0), last=False) == Later(f"http_{status}", 7)
    assert judged(answer._replace(retry_after=7.0), last=True) == Dead("max_deliver", f"http_{status}", 2)


def test_an_error_is_a_code_and_a_sentence() -> None:
    assert NO_ANSWER.error == "handler_timed_out: 20 s"
