"""The SQLite outbox: schema, the one writer with its group commit, accept, claim, settle, requeue, prune."""

from outbox.errors import stopped
from outbox.model import (
    Accepted,
    AcceptedRow,
    Caller,
    ClaimedRow,
    DoneRow,
    OutboxSettings,
    Post,
    RelayControl,
    RowFilter,
    Settlement,
    Unanswered,
    Verdict,
    to_datetime,
)
from outbox.outbox import Outbox

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
    "to_datetime",
]
