"""A received message, on its way into the file and out of it again."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import msgspec

from postroom._wire.administration import HistoryMessage

_encode: Final = msgspec.json.Encoder().encode


class MessageFilter(NamedTuple):
    """Which messages a reader wants; what is set must hold."""

    sender: str | None = None
    destination: str | None = None


class StoredMessage(NamedTuple):
    """A row of the inbox."""

    position: int
    received_at: int  # ms since the epoch
    message: bytes  # an encoded `HistoryMessage`

    def encoded(self) -> bytes:
        """Return the JSON of the `InboxMessage`, on one line: the message as it lies here, with two fields more."""
        moment = datetime.fromtimestamp(self.received_at / 1000, UTC).isoformat(timespec="milliseconds")
        return b'{"position":%d,"received_at":"%s",%s' % (self.position, moment.encode(), self.message[1:])


class Page(NamedTuple):
    """Some messages in order, and the position after which the next page begins: None where these are the last."""

    messages: list[StoredMessage]
    next_after: int | None


def row_of(message: HistoryMessage, received_at: int) -> dict[str, Any]:
    """Return what the query `file` writes."""
    return {
        "mesh": message.mesh,
        "sender": message.sender,
        "client_message_id": message.client_message_id,
        "broker_message_id": message.broker_message_id,
        "history_id": message.history_id,
        "destination": message.to,
        "received_at": received_at,
        "message": _encode(message),
    }
