"""The SQLite outbox: schema, the one writer with its group commit, accept, claim, settle, requeue, prune."""

from outbox.model import (
    AcceptedRow,
    Caller,
    ClaimedRow,
    OutboxCounts,
    RelayControl,
    RowFilter,
    Settlement,
    Verdict,
)
from outbox.outbox import Outbox, now_ms
from outbox.settings import OutboxSettings
from postroom._wire.operations import Verb

__all__ = [
    "AcceptedRow",
    "Caller",
    "ClaimedRow",
    "Outbox",
    "OutboxCounts",
    "OutboxSettings",
    "RelayControl",
    "RowFilter",
    "Settlement",
    "Verb",
    "Verdict",
    "now_ms",
]
