"""How the relay reads the broker's answer for one message: the table of docs/contract/send.md#send-60.

| answer                     | row                                                             |
|----------------------------|-----------------------------------------------------------------|
| 201, 200 duplicate         | done                                                            |
| 409, any other 4xx         | dead, with the problem's code and detail                        |
| 429                        | pending, due after `retry_after`                                |
| 5xx                        | pending, exponential backoff with full jitter by its attempts   |

No attempt count ever kills a row. The functions are pure: randomness comes in as an argument.
"""

from __future__ import annotations

import re
from enum import StrEnum
from http import HTTPStatus
from random import Random
from typing import Final, NamedTuple

from broker_client.settings import RelaySettings
from outbox.model import ClaimedRow, Settlement, Verdict
from postroom.accept import AcceptAnswer
from postroom.chassis.logs import clean
from postroom.retry import clamp_retry_after

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


class Waits(NamedTuple):
    """What the wait before a retry depends on."""

    rng: Random
    settings: RelaySettings

    def wait_ms(self, failures: int) -> int:
        """Return how long to wait after `failures` failures."""
        return round(self.settings.backoff.seconds(failures, self.rng.random) * 1000)


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


def settlement_for(row: ClaimedRow, answer: AcceptAnswer, waits: Waits) -> Settlement:
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
            return _retry(row, answer, _wait_after_limit(row, answer, waits), answered=True)
        case _:  # the broker itself may not know what became of it
            return _retry(row, answer, waits.wait_ms(row.attempts + 1), answered=False)


def backed_off(row: ClaimedRow, reason: str, waits: Waits, *, answered: bool | None) -> Settlement:
    """Back off the one message that makes every request with it fail; `answered` as `returned` has it."""
    wait_ms = waits.wait_ms(row.attempts + 1)
    return Settlement(row.row_id, Verdict.RETRY, last_error=clean(reason), wait_ms=wait_ms, answered=answered)


def returned(
    row: ClaimedRow, reason: str | None = None, *, wait_ms: int = 0, answered: bool | None = None
) -> Settlement:
    """Give a row back as if it had not been claimed: it was never posted, or its request failed as a whole.

    `answered` is False where that request may have taken effect.
    """
    last_error = None if reason is None else clean(reason)
    return Settlement(
        row.row_id,
        Verdict.RETRY,
        last_error=last_error,
        wait_ms=wait_ms,
        burns_attempt=False,
        answered=answered,
    )


def expired(row: ClaimedRow, max_age_hours: int) -> Settlement:
    """Retire a row that is too old to be posted: the broker may no longer recognise its id."""
    detail = f"older than {max_age_hours} h: the broker might no longer recognise its id; requeue it to send it again"
    return Settlement(row.row_id, Verdict.DEAD, last_error=f"expired: {detail}", burns_attempt=False)


def not_dated(row: ClaimedRow, wait_ms: int) -> Settlement:
    """Give a row back that is too old to be posted, by a clock that nobody has confirmed."""
    detail = "it may be too old to be posted, but the broker has not confirmed this machine's clock: check the time"
    return returned(row, f"clock_unconfirmed: {detail}", wait_ms=wait_ms)


def _retry(row: ClaimedRow, answer: AcceptAnswer, wait_ms: int, *, answered: bool) -> Settlement:
    return Settlement(row.row_id, Verdict.RETRY, last_error=_error_text(answer), wait_ms=wait_ms, answered=answered)


def _wait_after_limit(row: ClaimedRow, answer: AcceptAnswer, waits: Waits) -> int:
    seconds = answer.problem.retry_after if answer.problem is not None else None
    return waits.wait_ms(row.attempts + 1) if seconds is None else round(clamp_retry_after(seconds) * 1000)


def _error_text(answer: AcceptAnswer) -> str:
    """Word `last_error` as `<code>: <detail>`, the form that the outbox's `code` filter reads."""
    if answer.problem is None:
        return f"http_{answer.status}: the broker gave no reason"
    code = answer.problem.code if _CODE.fullmatch(answer.problem.code) else f"http_{answer.status}"
    return f"{code}: {clean(answer.problem.detail)}"
