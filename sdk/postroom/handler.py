"""What a handler receives: the body of the POST that a consumer makes (docs/contract/delivery.md#delivery-41).

    request = msgspec.json.decode(body, type=HandlerRequest)

The headers are `Idempotency-Key` (the message id: the same for every attempt, so that a handler that remembers it
has each effect once), `Postroom-Attempt` (1 for the first), `traceparent` where the sender set one,
`Postroom-Last-Error` after an attempt that failed, and `Postroom-Signature` where both sides share a secret
(`postroom.signatures`).

The handler answers 2xx when the effect has happened, 409 when it had happened before, 422 when the message can never be
handled, and anything else, such as 503 with `Retry-After`, to have it retried later. `postroom.transaction.inbox` has
the effect once where it is in a Postgres of the handler's own.
"""

from datetime import datetime
from typing import Any

import msgspec

from postroom._wire.ids import context_of

__all__ = ["HandlerRequest"]


class HandlerRequest(msgspec.Struct, kw_only=True):
    """One message for a handler; `consumer` is the durable consumer that it is from."""

    message_id: str
    subject: str
    event_type: str
    event_version: int
    occurred_at: datetime
    correlation_id: str | None = None
    causation_id: str | None = None
    consumer: str | None = None
    payload: Any

    @property
    def mesh(self) -> str:
        """The mesh that the message is of, as its subject says."""
        return context_of(self.subject)
