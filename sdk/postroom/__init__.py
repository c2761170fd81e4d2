"""Postroom, for programs: hand a message to the daemon of this machine and carry on."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from postroom._wire.administration import HistoryQuery
from postroom._wire.ids import new_id
from postroom._wire.message import SendRequest
from postroom._wire.operations import ListQuery, RowFilter
from postroom._wire.sends import BatchResult, EventsQuery, InboxMessage, InboxQuery, OutboxRow, SendResult
from postroom.errors import Conflict, Gone, InvalidMessage, NotFound, NotPermitted, PostroomError, TryAgain, Unavailable
from postroom.flow import Flow

if TYPE_CHECKING:
    from postroom.blocking import Client
    from postroom.broker import BrokerClient
    from postroom.client import AsyncClient

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

# The clients bring aiohttp, for which nobody should wait who wants no more than an exit code: `postroom --help`.
_CLIENTS: Final = {"AsyncClient": "client", "BrokerClient": "broker", "Client": "blocking"}


def __getattr__(name: str) -> Any:
    if name not in _CLIENTS:
        raise AttributeError(f"module 'postroom' has no attribute {name!r}")
    return getattr(import_module(f"postroom.{_CLIENTS[name]}"), name)
