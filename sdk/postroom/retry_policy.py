"""How often a message may be attempted, and how long it waits in between (docs/contract/delivery.md#delivery-76).

The sender puts the policy into the message's `meta`; an event or command that is emitted by other means has it as
`retry_policy` at the top of its payload:

    client.send("queue:work", body, meta={"retry_policy": {"max_attempts": 3, "backoff_ms": 500}})

A consumer follows it instead of its own schedule. It can only lower the number of attempts: `max_deliver`, which the
consumer's operator sets, stays the most. After the last attempt the message is dead-lettered.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from postroom._wire.retry import STEADY, Backoff
from postroom._wire.words import shape_fault
from postroom.errors import InvalidMessage

__all__ = ["DAY_MS", "MEMBER", "RetryPolicy", "check_retry_policy", "policy_of"]

MEMBER: Final = "retry_policy"  # of meta, or of a payload
DAY_MS: Final = 86_400_000
_PRESENT: Final = b'"retry_policy"'


class RetryPolicy(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """`max_attempts` counts the first one; None leaves it to the consumer. Pauses double from `backoff_ms` on."""

    max_attempts: Annotated[int, Meta(ge=1, le=1000)] | None = None
    backoff_ms: Annotated[int, Meta(ge=1, le=DAY_MS)] = 1000
    max_backoff_ms: Annotated[int, Meta(ge=1, le=DAY_MS)] = 300_000

    @property
    def backoff(self) -> Backoff:
        """How long to wait before the next attempt."""
        return Backoff(self.backoff_ms / 1000, self.max_backoff_ms / 1000, least=STEADY)

    def most_attempts(self, max_deliver: int) -> int:
        """Return how many attempts there are at a consumer that allows `max_deliver`."""
        return max_deliver if self.max_attempts is None else min(self.max_attempts, max_deliver)


class _Message(msgspec.Struct):
    meta: dict[str, Any] | None = None


class _Body(msgspec.Struct):
    retry_policy: Any = None
    message: _Message | None = None


_decode_body: Final = msgspec.json.Decoder(_Body).decode


def check_retry_policy(meta: Mapping[str, Any]) -> None:
    """Raise `InvalidMessage` where `meta` has an invalid retry policy."""
    if MEMBER not in meta:
        return
    try:
        msgspec.convert(meta[MEMBER], RetryPolicy)
    except msgspec.ValidationError as error:
        raise InvalidMessage.of(
            "invalid_retry_policy",
            f"meta.retry_policy is not a valid retry policy: {shape_fault(error, RetryPolicy)[1]}",
            field="meta.retry_policy",
        ) from error


def policy_of(data: bytes) -> RetryPolicy | None:
    """Return the policy that a message's body carries, if it carries one that can be followed.

    What came through Postroom was checked before (`check_retry_policy`); anything else is left to the consumer's own
    schedule, since a bad policy must not make a message a dead letter.
    """
    if _PRESENT not in data:  # most messages carry none, and are not decoded for it
        return None
    try:
        body = _decode_body(data)
        policy = body.retry_policy
        if policy is None and body.message is not None and body.message.meta is not None:
            policy = body.message.meta.get(MEMBER)
        return None if policy is None else msgspec.convert(policy, RetryPolicy)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
