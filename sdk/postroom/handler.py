"""What a handler receives: the body of the POST that a consumer makes (docs/contract/delivery.md#delivery-41).

    request = msgspec.json.decode(body, type=HandlerRequest)

The headers are `Idempotency-Key` (the message id: the same for every attempt, so that a handler that remembers it
has each effect once), `Postroom-Attempt` (1 for the first), `traceparent` where the sender set one,
`Postroom-Last-Error` after an attempt that failed, and `Postroom-Signature` where both sides share a secret
(`postroom.signatures`).

The handler answers 2xx when the effect has happened, 409 when it had happened before, 422 when the message can never be
handled, and anything else, such as 503 with `Retry-After`, to have it retried later.
"""

from datetime import datetime
from typing import Any

import msgspec

__all__ = ["HandlerRequest"]


class HandlerRequest(msgspec.Struct, kw_only=True):
    """One message for a handler."""

    message_id: str
    subject: str
    event_type: str
    event_version: int
    occurred_at: datetime
    correlation_id: str | None = None
    causation_id: str | None = None
    payload: Any
