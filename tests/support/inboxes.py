"""What the inbox's tests share: messages as the broker's history shows them, and the wire form they arrive in."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec

from inbox import Inbox
from postroom._wire.administration import HistoryMessage

MEMBER = "alice"


def message(number: int = 1, **different: Any) -> HistoryMessage:
    """Message `number` of the mesh `demo`, from bob to alice."""
    values: dict[str, Any] = {
        "history_id": number,
        "broker_message_id": str(UUID(int=number)),
        "client_message_id": f"id-{number}",
        "mesh": "demo",
        "sender": "bob",
        "to": f"dm:{MEMBER}",
        "destination_kind": "dm",
        "accepted_at": datetime(2026, 11, 21, 9, 0, tzinfo=UTC),
        "request_fingerprint": f"{number:064x}",
        "priority": "next",
        "body": f"message {number}",
        **different,
    }
    return HistoryMessage(**values)


def wire(sent: HistoryMessage, member: str = MEMBER) -> tuple[str, bytes, dict[str, str]]:
    """Return the subject, the body and the headers with which a delivery row is published."""
    headers = {"Nats-Msg-Id": f"{sent.broker_message_id}.{member}"}
    return f"{sent.mesh}.inbox.{member}", msgspec.json.encode(sent), headers


class Opened:
    """An inbox that is open."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def opened(self) -> Inbox:
        return self._inbox

    def trouble(self) -> None:
        """Nothing is wrong."""
