"""What an operator does to rows: each verb is one operation with a reason, and one line of the operator log.

The rules begin at docs/contract/send.md#send-83. A verb that the row's state forbids is a `Conflict` that says why.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from outbox.accepting import to_milliseconds
from outbox.errors import id_taken, payload_pruned, reason_missing, row_not_found, unanswered, wrong_state
from outbox.lanes import HELD, lane_for
from outbox.model import Caller
from outbox.relaying import WalkedPast
from outbox.settled import find_moved, find_row, unpack
from outbox.transaction import Transaction, room_of
from postroom._wire.message import PreparedSend, Priority
from postroom._wire.operations import VERBS, Verb
from postroom._wire.sends import RowStatus
from postroom._wire.sql import load_queries

_QUERIES: Final = load_queries("outbox", "sql/operate.sql")
_RESUMED: Final = 1000  # rows that a resume makes due; the others wait until their time, a minute at most as a rule


class _Row(NamedTuple):
    """What `get` returns, in its order."""

    seq: int
    id: str
    client_message_id: str
    status: RowStatus
    held: int
    next_attempt_at: int
    not_before: int | None
    priority: Priority
    payload_bytes: int
    room: int
    unanswered_at: int | None
    pruned: int


class Order(NamedTuple):
    """Who wants a verb done, and why; with `force` also to a row that the broker may have accepted.

    `doubt` is why it is not known whether the broker has it.
    """

    caller: Caller
    reason: str
    force: bool = False
    doubt: str | None = None

    def checked(self) -> Order:
        """Return the order; raises `InvalidMessage` where it gives no reason."""
        if not self.reason.strip():
            raise reason_missing()
        return self


class Act(NamedTuple):
    """Do a verb to a row; a requeue's successor may have an id that was chosen, and a patched message."""

    verb: Verb
    row_id: str
    order: Order
    walked: WalkedPast
    new_client_message_id: str | None = None
    patch: PreparedSend | None = None
    rows: int = 2

    def run(self, transaction: Transaction) -> str:
        """Do it; returns the row's id, of a requeue the successor's."""
        row = _get(transaction, self.row_id)
        if self.verb == "requeue" and row.pruned and self.patch is None:
            raise payload_pruned(row.id, row.status)
        why = why_not(self.verb, row.status, held=bool(row.held))
        if why is not None:
            raise wrong_state(self.verb, row.id, why)
        forced = None
        if VERBS[self.verb].retires and row.unanswered_at is not None:
            if not self.order.force:
                raise unanswered(self.verb, row.id, self.order.doubt or "it was posted again meanwhile")
            forced = "forced: the broker may have accepted it"
        successor = detail = None
        now = transaction.now
        match self.verb:
            case "requeue":
                successor, detail = self._succeed(transaction, row)
            case "abort":
                _abort(transaction, row, None)
            case "hold" | "release" | "flush":
                due = max(now, row.not_before or now) if self.verb == "flush" else row.next_attempt_at
                lane = HELD if self.verb == "hold" else lane_for(row.priority, due, now)
                place = {"seq": row.seq, "lane": lane, "next_attempt_at": due}
                transaction.execute(_QUERIES["move"], place)
                if lane != HELD:
                    self.walked.forget()
        log(transaction, self.verb, self.order, row.id, ", ".join(filter(None, (detail, forced))) or None)
        return successor or row.id

    def _succeed(self, transaction: Transaction, row: _Row) -> tuple[str, str]:
        """Retire the row and write its successor; returns that one's id, and what the log says of it."""
        client_message_id = self.new_client_message_id or transaction.new_id()
        if transaction.value(_QUERIES["is_taken"], (client_message_id,)) or find_moved(
            transaction.db, [client_message_id], transaction.salt
        ):
            raise id_taken(client_message_id)
        successor = transaction.new_id()
        _abort(transaction, row, successor)
        now, patch = transaction.now, self.patch
        priority = patch.priority if patch else row.priority
        not_before = row.not_before
        if patch is not None and patch.not_before is not None:
            not_before = to_milliseconds(patch.not_before)
        due = max(now, not_before or now)
        values: dict[str, object] = {
            "seq": row.seq,
            "number": transaction.next_seq,
            "id": successor,
            "client_message_id": client_message_id,
            "now": transaction.dated,
            "next_attempt_at": due,
            "lane": lane_for(priority, due, now),
        }
        if patch is not None:
            values |= {
                "fingerprint": patch.fingerprint,
                "priority": priority,
                "destination": patch.destination,
                "not_before": not_before,
                "payload": patch.payload,
            }
        query = "succeed_patched" if patch else "succeed"
        transaction.execute(_QUERIES[query], values)
        transaction.execute(_QUERIES[f"{query}_payload"], values)
        transaction.next_seq = None
        size = len(patch.payload) if patch else row.payload_bytes
        transaction.added(1, size, room_of(size))
        return successor, f"superseded by {successor} ({client_message_id})" + (", patched" if patch else "")


class Log(NamedTuple):
    """Write a line of the operator log that concerns no single row."""

    verb: str
    order: Order
    detail: str
    rows: int = 1

    def run(self, transaction: Transaction) -> None:
        """Write it."""
        log(transaction, self.verb, self.order, None, self.detail)


class Control(NamedTuple):
    """Pause or resume the relay, or set its rate, for a destination ('' for all)."""

    destination: str
    paused: bool
    rate_per_second: float | None
    order: Order
    walked: WalkedPast
    rows: int = _RESUMED

    def run(self, transaction: Transaction) -> None:
        """Keep it on disk; what waits for its next attempt is due once the relay is resumed."""
        values = {"destination": self.destination, "paused": self.paused, "rate_per_second": self.rate_per_second}
        transaction.execute(_QUERIES["set_control"], values)
        if not self.paused:
            wanted = {"destination": self.destination, "now": transaction.now, "limit": _RESUMED}
            transaction.execute(_QUERIES["resume"], wanted)
            self.walked.forget()
        rate = f", {self.rate_per_second:g}/s" if self.rate_per_second is not None else ""
        detail = f"relay of {self.destination or 'everything'}{rate}"
        log(transaction, "pause" if self.paused else "resume", self.order, None, detail)


def _get(transaction: Transaction, row_id: str) -> _Row:
    seq = find_row(transaction.db, row_id)
    if seq is None:
        raise row_not_found(row_id)
    row = _Row(*transaction.db.execute(_QUERIES["get"], (seq,)).fetchone())
    return row._replace(id=unpack(row.id), client_message_id=unpack(row.client_message_id))


_STATE: Final[dict[RowStatus, str]] = {
    "pending": "it is pending",
    "inflight": "it is inflight, its outcome is not known yet: wait for it",
    "done": "it is done, the broker accepted it",
    "dead": "it is dead",
    "aborted": "it is aborted, an operator retired it before: see `postroom outbox inspect`",
}


def why_not(verb: Verb, status: RowStatus, *, held: bool) -> str | None:
    """Return why a row's state forbids `verb`, as the end of a sentence; None where it does not."""
    allowed = VERBS[verb]
    if status not in allowed.states:
        return _STATE[status]
    if allowed.held is None or allowed.held == held:
        return None
    return "it is not held" if allowed.held else "it is held: release it"


def _abort(transaction: Transaction, row: _Row, successor: str | None) -> None:
    transaction.execute(_QUERIES["abort"], {"seq": row.seq, "now": transaction.now, "successor": successor})
    transaction.changed(row.status, "aborted", 1, row.room)


def log(transaction: Transaction, verb: str, order: Order, row_id: str | None, detail: str | None = None) -> None:
    """Write a line of the operator log."""
    line = {"at": transaction.now, "verb": verb, "actor": str(order.caller), "reason": order.reason.strip()}
    transaction.execute(_QUERIES["log"], {**line, "row_id": row_id, "detail": detail})
