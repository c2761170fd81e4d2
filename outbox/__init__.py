"""The SQLite outbox: schema, the one writer with its group commit, accept, claim, settle, requeue, prune."""

from outbox.errors import stopped
from outbox.model import (
    Accepted,
    AcceptedRow,
    Caller,
    ClaimedRow,
    DoneRow,
    OutboxCounts,
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
from postroom._wire.operations import Verb

__all__ = [
    "Accepted",
    "AcceptedRow",
    "Caller",
    "ClaimedRow",
    "DoneRow",
    "Outbox",
    "OutboxCounts",
    "OutboxSettings",
    "Post",
    "RelayControl",
    "RowFilter",
    "Settlement",
    "Unanswered",
    "Verb",
    "Verdict",
    "stopped",
    "to_datetime",
]
