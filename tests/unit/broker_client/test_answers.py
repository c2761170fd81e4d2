"""Every row of the table of docs/contract/send.md#send-60: the broker's answer for one message."""

from __future__ import annotations

from random import Random

import pytest

from broker_client.answers import Outcome, Waits, backed_off, expired, outcome_of, returned
from broker_client.answers import settlement_for as settle
from broker_client.settings import RelaySettings
from outbox.model import ClaimedRow, Verdict
from postroom._wire.accept import AcceptAnswer
from postroom.errors import Problem


def row(attempts: int = 0) -> ClaimedRow:
    return ClaimedRow("row", "id", bytes(32), b"{}", "topic:orders", attempts, 0)


class Highest(Random):
    """Draws the upper end, so that a test sees the bound."""

    def random(self) -> float:
        return 1.0


WAITS = Waits(Highest(), RelaySettings())


def refused(status: int, code: str = "because", detail: str = "it is so", retry_after: float | None = None):
    problem = Problem(
        type="t", title="T", status=status, detail=detail, code=code, retryable=False, retry_after=retry_after
    )
    return AcceptAnswer(status=status, client_message_id="id", problem=problem)


@pytest.mark.parametrize(("status", "outcome"), [(201, Outcome.ACCEPTED), (200, Outcome.DUPLICATE)])
def test_accepted_and_duplicate_make_the_row_done_with_the_brokers_ids(status, outcome):
    answer = AcceptAnswer(status=status, client_message_id="id", broker_message_id="b-1", history_id=7)
    settlement = settle(row(), answer, WAITS)
    assert (settlement.row_id, settlement.verdict) == ("row", Verdict.DONE)
    assert (settlement.broker_message_id, settlement.history_id) == ("b-1", 7)
    assert outcome_of(answer) is outcome


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (409, Outcome.CONFLICT),
        *((status, Outcome.REJECTED) for status in (400, 401, 403, 404, 408, 410, 413, 415, 422, 451, 499)),
    ],
)
def test_a_conflict_and_any_other_4xx_make_the_row_dead_with_code_and_detail(status, outcome):
    settlement = settle(row(), refused(status, "topic_not_found", "there is no topic x"), WAITS)
    assert settlement.verdict is Verdict.DEAD
    assert settlement.last_error == "topic_not_found: there is no topic x"
    assert outcome_of(refused(status)) is outcome


@pytest.mark.parametrize(
    ("asked", "seconds"), [(30.0, 30), (0.2, 1), (-1, 1), (31_536_000, 900), (float("inf"), 900), (None, 0.5)]
)
def test_a_429_makes_the_row_due_after_retry_after(asked, seconds):
    settlement = settle(row(), refused(429, retry_after=asked), WAITS)
    assert settlement.verdict is Verdict.RETRY
    assert settlement.wait_ms == seconds * 1000


@pytest.mark.parametrize("status", [500, 502, 503, 507, 599])
def test_a_5xx_backs_the_row_off(status):
    settlement = settle(row(), refused(status, "database_down"), WAITS)
    assert settlement.verdict is Verdict.RETRY
    assert settlement.wait_ms == 500
    assert settlement.burns_attempt
    assert settlement.last_error == "database_down: it is so"


@pytest.mark.parametrize(
    ("attempts", "seconds"), [(0, 0.5), (1, 1), (2, 2), (6, 32), (7, 60), (8, 60), (10**6, 60), (10**18, 60)]
)
def test_the_backoff_doubles_to_a_minute_and_no_attempt_count_kills_a_row(attempts, seconds):
    settlement = settle(row(attempts), refused(500), WAITS)
    assert settlement.verdict is Verdict.RETRY
    assert settlement.wait_ms == seconds * 1000


def test_the_jitter_is_full():
    waits = Waits(Random(7), RelaySettings())
    drawn = [settle(row(9), refused(500), waits).wait_ms for _ in range(400)]
    assert min(drawn) < 6_000
    assert max(drawn) > 54_000
    assert all(0 <= wait <= 60_000 for wait in drawn)


def test_an_answer_without_a_reason_still_says_its_status():
    answer = AcceptAnswer(status=422, client_message_id="id")
    assert settle(row(), answer, WAITS).last_error == "http_422: the broker gave no reason"
    assert settle(row(), refused(422, "odd", ""), WAITS).last_error == "odd: the broker gave no reason"


@pytest.mark.parametrize("code", ["", "Not A Code", "a: b", "x" * 65, "é"])
def test_a_code_that_is_none_is_replaced_by_the_status(code):
    assert settle(row(), refused(400, code), WAITS).last_error == "http_400: it is so"


def test_a_row_whose_request_failed_goes_back_without_an_attempt():
    settlement = returned(row(3), "broker_failed: gone", wait_ms=9)
    assert settlement.verdict is Verdict.RETRY
    assert not settlement.burns_attempt
    assert (settlement.wait_ms, settlement.last_error) == (9, "broker_failed: gone")


def test_the_one_message_to_blame_is_backed_off_alone():
    settlement = backed_off(row(3), "broker_failed: again", WAITS, answered=False)
    assert settlement.verdict is Verdict.RETRY
    assert settlement.burns_attempt
    assert settlement.wait_ms == 4_000


def test_a_row_that_is_too_old_is_dead_with_code_expired():
    settlement = expired(row(), 144)
    assert settlement.verdict is Verdict.DEAD
    assert (settlement.last_error or "").startswith("expired: older than 144 h")


@pytest.mark.parametrize(("status", "answered"), [(404, True), (409, True), (429, True), (500, False), (503, False)])
def test_a_refusal_answers_for_a_row_and_a_failure_of_the_broker_does_not(status, answered):
    assert settle(row(), refused(status), WAITS).answered is answered


def test_what_the_broker_had_before_is_done_as_a_duplicate():
    answers = [
        AcceptAnswer(status=status, client_message_id="id", broker_message_id="B", history_id=1)
        for status in (200, 201)
    ]
    assert [settle(row(), answer, WAITS).duplicate for answer in answers] == [True, False]
