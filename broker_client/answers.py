"""How the relay reads the broker's answer for one message (docs/contract/send.md#send-60), or for a whole request.

No attempt count ever kills a row. The functions are pure: randomness comes in as an argument.

Where a whole request failed (docs/contract/send.md#send-62), the batch goes back to `pending` without an attempt of its
own, and the relay pauses. `REACTIONS` says what comes on top.
"""

import re
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum
from http import HTTPStatus
from random import Random
from typing import Final, NamedTuple

from broker_client.channel import Failure, RequestFailed
from broker_client.settings import RelaySettings
from outbox import ClaimedRow, Settlement, Verdict
from postroom._wire.accept import AcceptAnswer
from postroom._wire.retry import RETRY_AFTER_LEAST, Backoff, clamp_retry_after
from postroom.chassis.logs import clean
from postroom.chassis.routes import Histogram

_CODE: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_BOUNDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)  # seconds


class Outcome(StrEnum):
    """How one attempt ended, as the metrics count it."""

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


_OUTCOMES: Final = {201: Outcome.ACCEPTED, 200: Outcome.DUPLICATE, 409: Outcome.CONFLICT, 429: Outcome.RATE_LIMITED}
_SERVER_ERRORS: Final = 500  # and above; the link has refused what is below 400 and no success


def outcome_of(answer: AcceptAnswer) -> Outcome:
    """Sort an answer by its status."""
    other = Outcome.FAILED if answer.status >= _SERVER_ERRORS else Outcome.REJECTED
    return _OUTCOMES.get(answer.status, other)


def settlement_for(row: ClaimedRow, answer: AcceptAnswer, waits: Waits) -> Settlement:
    """Turn the broker's answer for `row` into its settlement."""
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
        case outcome:  # after a 5xx the broker itself may not know whether it stored the message
            limited = outcome is Outcome.RATE_LIMITED
            seconds = answer.problem.retry_after if limited and answer.problem is not None else None
            error = _error_text(answer)
            wait_ms = waits.wait_ms(row.attempts + 1) if seconds is None else round(clamp_retry_after(seconds) * 1000)
            return Settlement(row.row_id, Verdict.RETRY, last_error=error, wait_ms=wait_ms, answered=limited)


def backed_off(row: ClaimedRow, reason: str, waits: Waits, *, answered: bool | None) -> Settlement:
    """Back off the one message that makes every request with it fail; `answered` as in `returned`."""
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
        row.row_id, Verdict.RETRY, last_error=last_error, wait_ms=wait_ms, burns_attempt=False, answered=answered
    )


def expired(row: ClaimedRow, max_age_hours: int) -> Settlement:
    """Retire a row that is too old to be posted: the broker may no longer recognise its id."""
    detail = f"older than {max_age_hours} h: the broker might no longer recognise its id; requeue it to send it again"
    return Settlement(row.row_id, Verdict.DEAD, last_error=f"expired: {detail}", burns_attempt=False)


def not_dated(row: ClaimedRow, wait_ms: int) -> Settlement:
    """Give a row back that is too old to be posted, or due, by a clock that the broker has not confirmed."""
    detail = "it may be too old or too early, and the broker has not confirmed this machine's clock: check the time"
    return returned(row, f"clock_unconfirmed: {detail}", wait_ms=wait_ms)


def _error_text(answer: AcceptAnswer) -> str:
    """Word `last_error` as `<code>: <detail>`, the form that the outbox's `code` filter reads."""
    code, detail = ("", "") if answer.problem is None else (answer.problem.code, clean(answer.problem.detail))
    code = code if _CODE.fullmatch(code) else f"http_{answer.status}"
    return f"{code}: {detail or 'the broker gave no reason'}"


class Reaction(NamedTuple):
    """What a failure means beyond the pause.

    `degraded`: health says so, with the reason: an operator has to act. `suspicious`: the batch itself may be the
    cause, so it is halved. `recheck`: another broker may come back, so its features are asked for again. `busy`: the
    broker works, and asks for less at once. `untaken`: the broker took nothing of the request, since it did not arrive
    or was refused whole, if it was the broker that refused it.
    """

    degraded: bool = False
    suspicious: bool = False
    recheck: bool = False
    busy: bool = False
    untaken: bool = False


REACTIONS: Final[dict[Failure, Reaction]] = {
    Failure.UNREACHABLE: Reaction(recheck=True, untaken=True),
    Failure.TIMED_OUT: Reaction(suspicious=True),
    Failure.BROKEN_OFF: Reaction(suspicious=True),
    Failure.GARBAGE: Reaction(suspicious=True),
    Failure.SERVER_ERROR: Reaction(suspicious=True),
    Failure.REFUSED: Reaction(suspicious=True, untaken=True),
    Failure.NOT_NOW: Reaction(busy=True, untaken=True),
    Failure.OVERLOADED: Reaction(busy=True, untaken=True),
    Failure.NOT_PERMITTED: Reaction(degraded=True, recheck=True, untaken=True),
}


def pause_seconds(error: RequestFailed, failures: int, rng: Random, settings: RelaySettings) -> float:
    """Return how long to pause after `failures` failures in a row, at least as long as the broker asked for.

    After an outage it is backoff. What a busy broker asks for is spread over twice the time, or all the daemons that it
    refused together would come back together; none waits longer for that than docs/contract/send.md#send-66 allows.
    """
    if REACTIONS[error.failure].busy:
        asked = error.retry_after or RETRY_AFTER_LEAST
        longest = clamp_retry_after(2 * asked)
        return Backoff(longest, longest, least=asked / longest).seconds(1, rng.random)
    return max(settings.backoff.seconds(failures, rng.random), error.retry_after or 0)


class RelayCounters:
    """Counted since the start of the process.

    `attempts` by `Outcome`; `batches` by `answered` or the `Failure`; `latency` is that of all posts.
    """

    def __init__(self) -> None:
        self.attempts: Counter[str] = Counter({outcome.value: 0 for outcome in Outcome})
        self.batches: Counter[str] = Counter()
        self.latency = Histogram(_BOUNDS)

    def batch(self, result: str, outcomes: Iterable[Outcome], seconds: float) -> None:
        """Count one post: its result as a whole, the outcome of each message, and how long it took."""
        self.batches[result] += 1
        self.attempts.update(outcomes)
        self.latency.observe(seconds)
