"""What goes wrong with a whole request to the broker, as distinct from a message's own answer."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from postroom.errors import Unavailable


class Failure(StrEnum):
    """Why there is no answer per message."""

    UNREACHABLE = "broker_unreachable"  # no connection: the request never left
    TIMED_OUT = "broker_timed_out"
    BROKEN_OFF = "broker_connection_lost"
    GARBAGE = "broker_answer_invalid"
    SERVER_ERROR = "broker_failed"  # 5xx
    NOT_PERMITTED = "broker_refused_token"  # 401, 403, 404, or no token to show
    NOT_NOW = "broker_rate_limited"  # 429
    OVERLOADED = "broker_overloaded"  # 503 with this code: it has as much at work as it takes
    REFUSED = "broker_refused_request"  # any other 4xx


_STATUS: Final = {Failure.TIMED_OUT: 504, Failure.GARBAGE: 502, Failure.REFUSED: 502, Failure.SERVER_ERROR: 502}
_UNAVAILABLE: Final = 503


class RequestFailed(Unavailable):
    """A request to the broker came to nothing; whether it took effect there is not known.

    `failure` is what happened, `retry_after` the seconds that the broker asked for, already clamped.
    Passed on to a caller of the socket it is a 502, 503 or 504.
    """

    failure: Failure
    retry_after: float | None

    @classmethod
    def because(cls, failure: Failure, detail: str, retry_after: float | None = None) -> RequestFailed:
        """Build the error for `failure`; `detail` is one sentence without a token or a body."""
        status = _STATUS.get(failure, _UNAVAILABLE)
        error = cls.of(status, failure.value, detail, retryable=True, retry_after=retry_after)
        error.failure = failure
        error.retry_after = retry_after
        return error
