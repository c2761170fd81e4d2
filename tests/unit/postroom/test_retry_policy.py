from __future__ import annotations

from typing import Any

import msgspec
import pytest

from postroom._wire.message import prepare
from postroom.errors import InvalidMessage
from postroom.retry_policy import RetryPolicy, check_retry_policy, policy_of

THREE = {"max_attempts": 3, "backoff_ms": 500, "max_backoff_ms": 1500}


def encoded(body: Any) -> bytes:
    return msgspec.json.encode(body)


def test_pauses_double_from_the_first_to_the_most() -> None:
    policy = RetryPolicy(backoff_ms=500, max_backoff_ms=3000)
    pauses = [policy.backoff.seconds(attempt, lambda: 1.0) for attempt in (1, 2, 3, 4, 10_000)]
    assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert policy.backoff.seconds(1, lambda: 0.0) == 0.4


@pytest.mark.parametrize(("wished", "most"), [(None, 20), (3, 3), (20, 20), (100, 20)])
def test_a_policy_lowers_the_attempts_and_never_raises_them(wished: int | None, most: int) -> None:
    assert RetryPolicy(max_attempts=wished).most_attempts(20) == most


@pytest.mark.parametrize(
    "body",
    [
        {"retry_policy": THREE, "amount": 7},
        {
            "broker_message_id": "1",
            "mesh": "demo",
            "message": {"to": "queue:work", "meta": {"a": 1, "retry_policy": THREE}},
        },
    ],
)
def test_a_policy_is_found_in_a_payload_and_in_a_messages_meta(body: Any) -> None:
    assert policy_of(encoded(body)) == RetryPolicy(**THREE)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b'"retry_policy"',
        b'["retry_policy"]',
        b'{"retry_policy"',
        b'{"retry_policy": null}',
        b'{"retry_policy": {"max_attempts": 0}}',
        b'{"retry_policy": {"attempts": 1}}',
        b'{"message": {"meta": null}, "a": "retry_policy"}',
        b'{"message": 1, "a": "retry_policy"}',
        b'{"a": {"retry_policy": {"max_attempts": 3}}}',
        b'{"retry_policy": ' + b"[" * 100_000,
    ],
)
def test_a_body_without_a_policy_that_can_be_followed_has_none(data: bytes) -> None:
    assert policy_of(data) is None


@pytest.mark.parametrize(
    "policy",
    [None, 3, [], {"max_attempts": 0}, {"max_attempts": "3"}, {"backoff_ms": -1}, {"backoff_ms": 1e12}, {"tries": 3}],
)
def test_a_message_with_a_policy_that_is_none_is_refused_before_anything_is_written(policy: Any) -> None:
    with pytest.raises(InvalidMessage, match="retry_policy") as caught:
        prepare(encoded({"to": "queue:work", "meta": {"retry_policy": policy}}))
    assert (caught.value.code, caught.value.problem.field) == ("invalid_retry_policy", "meta.retry_policy")


@pytest.mark.parametrize("meta", [{}, {"retry_policy": THREE}, {"retry_policy": {}}, {"other": {"retry_policy": 3}}])
def test_a_message_with_a_policy_or_without_one_passes(meta: dict[str, Any]) -> None:
    check_retry_policy(meta)
    assert prepare(encoded({"to": "queue:work", "meta": meta})).client_message_id
