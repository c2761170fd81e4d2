"""The SQLite outbox: schema, the one writer with its group commit, accept, claim, settle, requeue, prune."""

from outbox.errors import stopped
from outbox.model import (
    Accepted,
    Caller,
    ClaimedRow,
    DoneRow,
    OutboxSettings,
    Post,
    RelayControl,
    Settlement,
    Unanswered,
    Verdict,
)
from outbox.outbox import Outbox
from postroom._wire.accept_table import AcceptedRow
from postroom._wire.operations import RowFilter

__all__ = [
    "Accepted",
    "AcceptedRow",
    "Caller",
    "ClaimedRow",
    "DoneRow",
    "Outbox",
    "OutboxSettings",
    "Post",
    "RelayControl",
    "RowFilter",
    "Settlement",
    "Unanswered",
    "Verdict",
    "stopped",
]
