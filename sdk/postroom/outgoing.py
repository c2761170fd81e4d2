"""What a program wants to send, as the bytes of a request: checked where JSON itself would change it silently."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from postroom.errors import InvalidMessage
from postroom.fingerprint import NotCanonical, canonical_json
from postroom.ids import new_id
from postroom.message import Priority, SendRequest


def compose(
    to: str,
    body: str | bytes | None = None,
    *,
    meta: dict[str, Any] | None = None,
    priority: Priority = "next",
    reply_to: str | None = None,
    mentions: Sequence[str] | None = None,
    client_message_id: str | None = None,
    not_before: datetime | None = None,
) -> SendRequest:
    """Build a send: bytes travel as `body_base64`; without a `client_message_id` one is minted."""
    return SendRequest(
        to=to,
        body=body if isinstance(body, str) else None,
        body_base64=base64.b64encode(body).decode() if isinstance(body, bytes) else None,
        meta=meta,
        priority=priority,
        reply_to=reply_to,
        mentions=None if mentions is None else list(mentions),
        client_message_id=new_id() if client_message_id is None else client_message_id,
        not_before=not_before,
    )


def with_id(request: SendRequest) -> SendRequest:
    """Return `request`, with a fresh id where it has none: what is tried twice needs one name."""
    if request.client_message_id is not None:
        return request
    return msgspec.structs.replace(request, client_message_id=new_id())


def encode(request: SendRequest) -> bytes:
    """Encode a send as JSON; raises `InvalidMessage` for what JSON can't say (NaN would become null)."""
    try:
        canonical_json(request.meta)
        return msgspec.json.encode(request)
    except NotCanonical as error:
        detail = f"meta cannot be fingerprinted (RFC 8785): {error}"
        raise InvalidMessage.of(400, "meta_not_canonical", detail, field="meta") from error
    except UnicodeEncodeError as error:
        detail = "the message holds half of a surrogate pair, which is no text: send bytes instead"
        raise InvalidMessage.of(400, "invalid_json", detail) from error
