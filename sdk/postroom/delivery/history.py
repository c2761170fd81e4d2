"""A committed message as its readers see it: the same in the broker's history and in a member's inbox."""

from __future__ import annotations

import base64

import asyncpg
import msgspec

from postroom._wire.administration import HistoryMessage


def history_message(row: asyncpg.Record) -> HistoryMessage:
    """Build the message from a row of the view `mesh.message`."""
    body: bytes = row["body"]
    return HistoryMessage(
        history_id=row["history_id"],
        broker_message_id=str(row["broker_message_id"]),
        client_message_id=row["client_message_id"],
        mesh=row["mesh"],
        sender=row["sender"],
        to=f"{row['destination_kind']}:{row['destination_ref']}",
        destination_kind=row["destination_kind"],
        accepted_at=row["accepted_at"],
        request_fingerprint=row["request_fingerprint"].hex(),
        priority=row["priority"],
        body=body.decode() if row["body_is_text"] else None,
        body_base64=None if row["body_is_text"] else base64.b64encode(body).decode(),
        meta=None if row["meta"] is None else msgspec.json.decode(row["meta"]),
        reply_to=row["reply_to"],
        traceparent=row["traceparent"],
    )
