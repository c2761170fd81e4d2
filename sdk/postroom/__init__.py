"""Postroom, for programs: hand a message to the daemon of this machine and carry on."""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from postroom._wire.administration import HistoryQuery
    from postroom._wire.ids import new_id
    from postroom._wire.message import SendRequest
    from postroom._wire.operations import ListQuery, RowFilter
    from postroom._wire.sends import BatchResult, EventsQuery, InboxMessage, InboxQuery, OutboxRow, SendResult
    from postroom.blocking import Client
    from postroom.broker import BrokerClient
    from postroom.client import AsyncClient
    from postroom.errors import (
        Conflict,
        Gone,
        InvalidMessage,
        NotFound,
        NotPermitted,
        PostroomError,
        TryAgain,
        Unavailable,
    )
    from postroom.flow import Flow

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

# Nobody should wait for what it does not use: a handler for the clients, `postroom --help` for any of this.
_HOMES: Final = {
    "_wire.administration": ("HistoryQuery",),
    "_wire.ids": ("new_id",),
    "_wire.message": ("SendRequest",),
    "_wire.operations": ("ListQuery", "RowFilter"),
    "_wire.sends": ("BatchResult", "EventsQuery", "InboxMessage", "InboxQuery", "OutboxRow", "SendResult"),
    "blocking": ("Client",),
    "broker": ("BrokerClient",),
    "client": ("AsyncClient",),
    "errors": (
        "Conflict",
        "Gone",
        "InvalidMessage",
        "NotFound",
        "NotPermitted",
        "PostroomError",
        "TryAgain",
        "Unavailable",
    ),
    "flow": ("Flow",),
}
_HOME_OF: Final = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in {"errors", "flow"}:
        return import_module(f"postroom.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'postroom' has no attribute {name!r}")
    return getattr(import_module(f"postroom.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
