"""What a daemon has received: the types of `/v1/inbox` and `/v1/events` (docs/contract/delivery.md#delivery-82)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Final

import msgspec

from postroom.administration import HistoryMessage

MAX_PAGE: Final = 1000  # messages in one answer


class InboxMessage(HistoryMessage, kw_only=True, omit_defaults=True):
    """A received message: as the broker's history shows it, and where it lies in this daemon's inbox.

    `position` grows from message to message and is never given twice: it is the id of the event of `GET /v1/events`.
    """

    position: int
    received_at: datetime


class InboxQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/inbox`; `cursor` is the `next_cursor` of the page before.

    `since` is an RFC 3339 time with an offset: messages received then or later.
    """

    sender: str | None = None
    destination: str | None = None
    since: datetime | None = None
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = 100


class InboxPage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A page of received messages, oldest first; `next_cursor` continues it and is absent on the last page.

    A page may hold fewer messages than asked for and still have a next one: its size in bytes is bounded as well.
    """

    messages: list[InboxMessage]
    next_cursor: str | None = None


class EventsQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/events`: which messages, and from when on; without `since` only new ones.

    A `Last-Event-ID` header wins over `since`: the stream goes on after that message.
    """

    sender: str | None = None
    destination: str | None = None
    since: datetime | None = None
