import copy
import pickle

import msgspec
import pytest

from postroom.errors import (
    Conflict,
    InvalidMessage,
    NotFound,
    NotPermitted,
    PostroomError,
    Problem,
    TryAgain,
    Unavailable,
    error_for,
)
from postroom.once import KeyHeld


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, InvalidMessage),
        (413, InvalidMessage),
        (415, InvalidMessage),
        (401, NotPermitted),
        (403, NotPermitted),
        (404, NotFound),
        (409, Conflict),
        (429, TryAgain),
        (503, TryAgain),
        (507, TryAgain),
        (500, PostroomError),
        (418, PostroomError),
    ],
)
def test_a_problem_becomes_the_error_that_says_what_can_be_done(status: int, kind: type[PostroomError]) -> None:
    problem = PostroomError.of("some_code", "a sentence", status=status).problem
    error = error_for(problem)
    assert type(error) is kind
    assert (error.code, str(error), error.problem) == ("some_code", "a sentence", problem)


def test_a_problem_survives_json() -> None:
    problem = TryAgain.of("busy", "later", retryable=True, retry_after=1.5, field="to").problem
    assert msgspec.json.decode(msgspec.json.encode(problem), type=Problem) == problem


def test_a_problem_shows_only_what_is_set() -> None:
    problem = NotFound.of("row_not_found", "no such row").problem
    assert msgspec.to_builtins(problem) == {
        "type": "urn:postroom:problem:row_not_found",
        "title": "Not Found",
        "status": 404,
        "detail": "no such row",
        "code": "row_not_found",
        "retryable": False,
    }


def test_every_error_can_be_caught_by_the_base() -> None:
    with pytest.raises(PostroomError):
        raise Unavailable.of("daemon_absent", "nobody is there", retryable=True)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidMessage.of("invalid_name", "wrong"), 400),
        (InvalidMessage.of("payload_too_large", "wrong"), 413),
        (NotPermitted.of("missing_token", "who?"), 401),
        (NotPermitted.of("not_permitted", "no"), 403),
        (TryAgain.of("rate_limited", "later"), 429),
        (TryAgain.of("too_busy", "later"), 429),
        (TryAgain.of("stopping", "later"), 503),
        (TryAgain.of("disk_full", "later"), 507),
        (Conflict.of("outcome_unknown", "taken"), 409),
        (PostroomError.of("internal_error", "see the log"), 500),
    ],
)
def test_the_status_of_an_error_follows_from_its_code_or_its_class(error: PostroomError, status: int) -> None:
    assert error.problem.status == status


@pytest.mark.parametrize("kind", [Conflict, KeyHeld, PostroomError])
def test_an_error_is_whole_in_another_process_and_as_a_copy(kind: type[PostroomError]) -> None:
    """A pool of processes that cannot read an error breaks, or waits for it for ever."""
    error = kind(
        Conflict.of("idempotency_key_reused", "the id is taken", conflict="outbox_dead_fingerprint_match").problem
    )
    error.client_message_id = "k"
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301 - of this test
        assert (type(other), str(other), other.problem) == (kind, str(error), error.problem)
        assert other.client_message_id == "k"
