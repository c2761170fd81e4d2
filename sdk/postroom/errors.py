"""What goes wrong, as one shape for machines and people: an RFC 9457 problem with a stable `code`.

A server raises `PostroomError` and answers with its `problem`; a client reads the problem and raises the same class
again, narrowed by what the caller can do about it.
"""

from http import HTTPStatus
from typing import Any, Final, Self

import msgspec

__all__ = [
    "PROBLEM_JSON",
    "Conflict",
    "Gone",
    "InvalidMessage",
    "NotFound",
    "NotPermitted",
    "PostroomError",
    "Problem",
    "TryAgain",
    "Unavailable",
    "error_for",
]

PROBLEM_JSON: Final = "application/problem+json"

# The status of an error in HTTP, here and nowhere else: by its code, else by its class.
_STATUS_OF_CODE: Final = {
    "activity_missing": 404,
    "bad_request": 400,
    "batch_too_large": 413,
    "broker_answer_invalid": 502,
    "broker_failed": 502,
    "broker_refused_request": 502,
    "broker_timed_out": 504,
    "disk_full": 507,
    "expectation_failed": 417,
    "extra_missing": 501,
    "invalid_signature": 401,
    "invalid_token": 401,
    "jetstream_full": 507,
    "member_required": 400,
    "missing_signature": 401,
    "missing_token": 401,
    "nats_error": 502,
    "nats_not_configured": 502,
    "nats_unreachable": 502,
    "not_understood": 502,
    "outbox_full": 507,
    "payload_too_large": 413,
    "rate_limited": 429,
    "request_timeout": 408,
    "request_too_large": 413,
    "result_not_json": 422,
    "result_too_large": 413,
    "stale_signature": 401,
    "tables_missing": 501,
    "too_busy": 429,
    "too_many_readers": 429,
    "transaction_ended": 500,
    "unauthorized": 401,
    "unknown_activity": 500,
    "unsupported_encoding": 415,
    "unsupported_media_type": 415,
}
_STATUS_OF_CLASS: Final = {
    "Conflict": 409,
    "Fault": 409,  # of a ledger
    "Gone": 410,
    "InvalidAgent": 400,
    "InvalidFlow": 400,
    "InvalidMessage": 400,
    "NotFound": 404,
    "NotPermitted": 403,
    "PostroomError": 500,
    "TryAgain": 503,
    "Unavailable": 503,
}


class Problem(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An `application/problem+json` body (RFC 9457; docs/contract/send.md#send-23).

    `code` is a stable snake_case word to switch on; `detail` says what happened, to what, and what to do.
    `retryable` says whether the same request can succeed later. The rest is set where it applies.
    """

    type: str
    title: str
    status: int
    detail: str
    code: str
    retryable: bool
    field: str | None = None
    retry_after: float | None = None  # seconds
    # a 409 of the daemon (docs/contract/send.md#send-39) or of the broker (docs/contract/accept.md#accept-17)
    conflict: str | None = None
    request_fingerprint: str | None = None  # first 8 bytes, hex
    broker_fingerprint_prefix: str | None = None  # first 8 bytes, hex
    reason: str | None = None
    broker_message_id: str | None = None
    since: str | None = None  # RFC 3339
    destination: str | None = None
    # a 410 of the broker's history
    resume_after: int | None = None
    incarnation: str | None = None


class PostroomError(Exception):
    """The base of every error of Postroom; carries the problem it was answered with, or will be.

    `client_message_id` is set by a client's `send`: the id under which the message may have been kept anyway.
    """

    client_message_id: str | None = None

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem

    def __reduce__(self) -> tuple[Any, ...]:
        """Let it be copied, and raised in the process that waits for the one where it was raised."""
        return type(self), (self.problem,), self.__dict__

    @property
    def code(self) -> str:
        """The stable word to switch on."""
        return self.problem.code

    @property
    def retryable(self) -> bool:
        """Whether the same request can succeed later."""
        return self.problem.retryable

    @classmethod
    def of(cls, code: str, detail: str, *, status: int = 0, retryable: bool = False, **members: Any) -> Self:
        """Build the error with the extension `members` of `Problem`.

        A `status` is given by HTTP servers alone, where HTTP has refused the request; else it follows from the code.
        """
        status = (
            status
            or _STATUS_OF_CODE.get(code)
            or next(_STATUS_OF_CLASS[kind.__name__] for kind in cls.__mro__ if kind.__name__ in _STATUS_OF_CLASS)
        )
        return cls(
            Problem(
                type=f"urn:postroom:problem:{code}",
                title=HTTPStatus(status).phrase,
                status=status,
                detail=detail,
                code=code,
                retryable=retryable,
                **members,
            )
        )


class InvalidMessage(PostroomError):
    """The message itself is wrong (400, 413, 415, 422): nothing was written, and trying again changes nothing."""


class NotPermitted(PostroomError):
    """The caller may not do this (401, 403)."""


class NotFound(PostroomError):
    """There is no such row, message, member, topic or mesh (404)."""


class Conflict(PostroomError):
    """The id is taken, or the row's state forbids it (409)."""


class Gone(PostroomError):
    """What the cursor points to was lost (410): `problem.resume_after` is the position to resume from."""


class TryAgain(PostroomError):
    """Not now (429, 503, 507): the same request, with the same id, may succeed later."""


class Unavailable(PostroomError):
    """There was no answer, or not a valid one; it is not known whether the request took effect."""


_BY_STATUS: Final[dict[int, type[PostroomError]]] = {
    400: InvalidMessage,
    401: NotPermitted,
    403: NotPermitted,
    404: NotFound,
    409: Conflict,
    410: Gone,
    413: InvalidMessage,
    415: InvalidMessage,
    422: InvalidMessage,
    429: TryAgain,
    502: Unavailable,
    503: TryAgain,
    507: TryAgain,
}


def error_for(problem: Problem) -> PostroomError:
    """Choose the class that tells a caller of the client what can be done about `problem`."""
    return _BY_STATUS.get(problem.status, PostroomError)(problem)
