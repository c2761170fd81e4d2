"""The SQLite outbox: schema, the one writer with its group commit, accept, claim, settle, requeue, prune."""

from outbox.model import (
    Accepted,
    AcceptedRow,
    Caller,
    ClaimedRow,
    DoneRow,
    OutboxCounts,
    RelayControl,
    RowFilter,
    Settlement,
    Unanswered,
    Verdict,
    to_datetime,
)
from outbox.outbox import Outbox, now_ms
from outbox.settings import OutboxSettings
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
    "RelayControl",
    "RowFilter",
    "Settlement",
    "Unanswered",
    "Verb",
    "Verdict",
    "now_ms",
    "to_datetime",
]
