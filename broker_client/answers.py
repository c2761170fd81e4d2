"""How the relay reads the broker's answer for one message: the first table of spec send.md, "Relaying".

| answer                     | row                                                             |
|----------------------------|-----------------------------------------------------------------|
| 201, 200 duplicate         | done                                                            |
| 409, any other 4xx         | dead, with the problem's code and detail                        |
| 429                        | pending, due after `retry_after`                                |
| 5xx                        | pending, exponential backoff with full jitter by its attempts   |

No attempt count ever kills a row. The functions are pure: clock and randomness come in as arguments.
"""

from __future__ import annotations

import re
from enum import StrEnum
from http import HTTPStatus
from random import Random
from typing import Final, NamedTuple

from broker_client.settings import RelaySettings
from chassis.backoff import clamp_retry_after, full_jitter
from chassis.words import clean
from outbox.model import ClaimedRow, Settlement, Verdict
from postroom.accept import AcceptAnswer

_CODE: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")


class Outcome(StrEnum):
    """What one attempt came to, as the metrics count it."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    CONFLICT = "conflict"
    REJECTED = "rejected"
    RATE_LIMITED = "rate_limited"
    FAILED = "failed"  # 5xx for this message, or a request that only this message makes fail
    RETURNED = "returned"  # its whole request failed: no attempt of its own
    EXPIRED = "expired"


class Timing(NamedTuple):
    """What a retry's due time depends on."""

    now_ms: int
    rng: Random
    settings: RelaySettings

    def after(self, seconds: float) -> int:
        """Return the moment `seconds` from now, in ms since the epoch."""
        return self.now_ms + round(seconds * 1000)

    def backoff(self, failures: int) -> int:
        """Return the moment at which to try again after `failures` failures."""
        first, most = self.settings.backoff_first_seconds, self.settings.backoff_most_seconds
        return self.after(full_jitter(failures, self.rng, first=first, most=most))


_OUTCOMES: Final = {
    201: Outcome.ACCEPTED,
    200: Outcome.DUPLICATE,
    409: Outcome.CONFLICT,
    429: Outcome.RATE_LIMITED,
}
_SERVER_ERRORS: Final = 500  # and above; the link has refused what is below 400 and no success


def outcome_of(answer: AcceptAnswer) -> Outcome:
    """Sort an answer by its status."""
    other = Outcome.FAILED if answer.status >= _SERVER_ERRORS else Outcome.REJECTED
    return _OUTCOMES.get(answer.status, other)


def settlement_for(row: ClaimedRow, answer: AcceptAnswer, timing: Timing) -> Settlement:
    """Turn the broker's answer for `row` into what becomes of the row."""
    match outcome_of(answer):
        case Outcome.ACCEPTED | Outcome.DUPLICATE:
            return Settlement(
                row.row_id,
                Verdict.DONE,
                broker_message_id=answer.broker_message_id,
                history_id=answer.history_id,
                duplicate=answer.status == HTTPStatus.OK,
            )
        case Outcome.CONFLICT | Outcome.REJECTED:
            return Settlement(row.row_id, Verdict.DEAD, last_error=_error_text(answer), answered=True)
        case Outcome.RATE_LIMITED:
            return _retry(row, answer, _after_limit(row, answer, timing), answered=True)
        case _:  # the broker itself may not know what became of it
            return _retry(row, answer, timing.backoff(row.attempts + 1), answered=False)


def backed_off(row: ClaimedRow, reason: str, timing: Timing, *, answered: bool | None) -> Settlement:
    """Back off the one message that makes every request with it fail; `answered` as `returned` has it."""
    due = timing.backoff(row.attempts + 1)
    return Settlement(row.row_id, Verdict.RETRY, last_error=clean(reason), next_attempt_at=due, answered=answered)


def returned(row: ClaimedRow, due_ms: int, reason: str | None = None, *, answered: bool | None = None) -> Settlement:
    """Give a row back as if it had not been claimed: it was never posted, or its request failed as a whole.

    `answered` is False where that request may have taken effect.
    """
    last_error = None if reason is None else clean(reason)
    return Settlement(
        row.row_id,
        Verdict.RETRY,
        last_error=last_error,
        next_attempt_at=due_ms,
        burns_attempt=False,
        answered=answered,
    )


def expired(row: ClaimedRow, max_age_hours: int) -> Settlement:
    """Retire a row that is too old to be posted: the broker may no longer recognise its id."""
    detail = f"older than {max_age_hours} h: the broker might no longer recognise its id; requeue it to send it again"
    return Settlement(row.row_id, Verdict.DEAD, last_error=f"expired: {detail}", burns_attempt=False)


def not_dated(row: ClaimedRow, due_ms: int) -> Settlement:
    """Give a row back that is too old to be posted, by a clock that nobody has confirmed."""
    detail = "it may be too old to be posted, but the broker has not confirmed this machine's clock: check the time"
    return returned(row, due_ms, f"clock_unconfirmed: {detail}")


def _retry(row: ClaimedRow, answer: AcceptAnswer, due_ms: int, *, answered: bool) -> Settlement:
    return Settlement(
        row.row_id, Verdict.RETRY, last_error=_error_text(answer), next_attempt_at=due_ms, answered=answered
    )


def _after_limit(row: ClaimedRow, answer: AcceptAnswer, timing: Timing) -> int:
    seconds = answer.problem.retry_after if answer.problem is not None else None
    return timing.backoff(row.attempts + 1) if seconds is None else timing.after(clamp_retry_after(seconds))


def _error_text(answer: AcceptAnswer) -> str:
    """Word `last_error` as `<code>: <detail>`, the form that the outbox's `code` filter reads."""
    if answer.problem is None:
        return f"http_{answer.status}: the broker gave no reason"
    code = answer.problem.code if _CODE.fullmatch(answer.problem.code) else f"http_{answer.status}"
    return f"{code}: {clean(answer.problem.detail)}"
