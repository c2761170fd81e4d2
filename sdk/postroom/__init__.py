"""Postroom, for programs: hand a message to the daemon of this machine and walk away."""

from postroom.administration import HistoryQuery
from postroom.blocking import Client
from postroom.broker import BrokerClient
from postroom.client import AsyncClient
from postroom.errors import Conflict, Gone, InvalidMessage, NotFound, NotPermitted, PostroomError, TryAgain, Unavailable
from postroom.flow import Flow
from postroom.ids import new_id
from postroom.message import SendRequest
from postroom.operations import ListQuery, RowFilter
from postroom.received import EventsQuery, InboxMessage, InboxQuery
from postroom.sends import BatchResult, OutboxRow, SendResult

__all__ = [
    "AsyncClient",
    "BatchResult",
    "BrokerClient",
    "Client",
    "Conflict",
    "EventsQuery",
    "Flow",
    "Gone",
    "HistoryQuery",
    "InboxMessage",
    "InboxQuery",
    "InvalidMessage",
    "ListQuery",
    "NotFound",
    "NotPermitted",
    "OutboxRow",
    "PostroomError",
    "RowFilter",
    "SendRequest",
    "SendResult",
    "TryAgain",
    "Unavailable",
    "new_id",
]
