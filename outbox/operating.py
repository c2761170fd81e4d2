"""What an operator does to rows: each verb is one operation with a reason, and one line of the operator log.

The rules begin at docs/contract/send.md#send-83. A verb that the row's state forbids is a `Conflict` that says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from outbox.accepting import to_milliseconds
from outbox.errors import id_taken, payload_pruned, reason_missing, row_not_found, unanswered, wrong_state
from outbox.lanes import HELD, lane_for
from outbox.model import Caller
from outbox.relaying import WalkedPast
from outbox.settled import find_moved, find_row, unpack
from outbox.transaction import Transaction, room_of
from postroom._wire.message import PreparedSend, Priority
from postroom._wire.operations import Verb as Verb  # noqa: PLC0414 - one of this module's words too
from postroom._wire.sends import RowStatus
from postroom.chassis.sql import load_queries

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


class Requeue(NamedTuple):
    """Retire a row and write its successor under a fresh id, perhaps with a patched message."""

    row_id: str
    order: Order
    new_client_message_id: str | None = None
    patch: PreparedSend | None = None
    rows: int = 2

    def run(self, transaction: Transaction) -> str:
        """Requeue; returns the successor's id."""
        row = _get(transaction, self.row_id)
        if row.pruned and self.patch is None:
            raise payload_pruned(row.id, row.status)
        _require(row, "requeue")
        forced = _require_outcome(row, "requeue", self.order)
        client_message_id = self.new_client_message_id or transaction.new_id()
        if transaction.value(_QUERIES["is_taken"], (client_message_id,)) or find_moved(
            transaction.db, [client_message_id], transaction.salt
        ):
            raise id_taken(client_message_id)
        successor = transaction.new_id()
        _abort(transaction, row, successor)
        self._write_successor(transaction, row, successor, client_message_id)
        detail = f"superseded by {successor} ({client_message_id})" + (", patched" if self.patch else "") + forced
        log(transaction, "requeue", self.order, row.id, detail)
        return successor

    def _write_successor(self, transaction: Transaction, row: _Row, successor: str, client_message_id: str) -> None:
        now = transaction.now
        patch = self.patch
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


class Abort(NamedTuple):
    """Retire a row without a successor."""

    row_id: str
    order: Order
    rows: int = 1

    def run(self, transaction: Transaction) -> str:
        """Abort; returns the row's id."""
        row = _get(transaction, self.row_id)
        _require(row, "abort")
        forced = _require_outcome(row, "abort", self.order)
        _abort(transaction, row, None)
        log(transaction, "abort", self.order, row.id, forced.removeprefix(", ") or None)
        return row.id


class Hold(NamedTuple):
    """Keep a pending row back until it is released."""

    row_id: str
    order: Order
    rows: int = 1

    def run(self, transaction: Transaction) -> str:
        """Hold; returns the row's id."""
        row = _get(transaction, self.row_id)
        _require(row, "hold")
        _move(transaction, row, HELD, row.next_attempt_at)
        log(transaction, "hold", self.order, row.id)
        return row.id


class Release(NamedTuple):
    """Let a held row go on."""

    row_id: str
    order: Order
    walked: WalkedPast
    rows: int = 1

    def run(self, transaction: Transaction) -> str:
        """Release; returns the row's id."""
        row = _get(transaction, self.row_id)
        _require(row, "release")
        self.walked.forget()
        lane = lane_for(row.priority, row.next_attempt_at, transaction.now)
        _move(transaction, row, lane, row.next_attempt_at)
        log(transaction, "release", self.order, row.id)
        return row.id


class Flush(NamedTuple):
    """Retry a pending row now, whatever its backoff; `not_before` stands."""

    row_id: str
    order: Order
    walked: WalkedPast
    rows: int = 1

    def run(self, transaction: Transaction) -> str:
        """Flush; returns the row's id."""
        row = _get(transaction, self.row_id)
        _require(row, "flush")
        self.walked.forget()
        due = max(transaction.now, row.not_before or transaction.now)
        _move(transaction, row, lane_for(row.priority, due, transaction.now), due)
        log(transaction, "flush", self.order, row.id)
        return row.id


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


Build = Callable[[str, Order], Requeue | Abort | Hold | Release | Flush]


def verbs(walked: WalkedPast) -> dict[Verb, Build]:
    """Return how each verb on one row is built from the row's id and the order."""
    return {
        "requeue": Requeue,
        "abort": Abort,
        "hold": Hold,
        "release": lambda row_id, order: Release(row_id, order, walked),
        "flush": lambda row_id, order: Flush(row_id, order, walked),
    }


def _get(transaction: Transaction, row_id: str) -> _Row:
    seq = find_row(transaction.db, row_id)
    if seq is None:
        raise row_not_found(row_id)
    row = _Row(*transaction.db.execute(_QUERIES["get"], (seq,)).fetchone())
    return row._replace(id=unpack(row.id), client_message_id=unpack(row.client_message_id))


_STATES: Final[dict[Verb, frozenset[RowStatus]]] = {
    "requeue": frozenset({"pending", "dead"}),
    "abort": frozenset({"pending", "dead"}),
    "hold": frozenset({"pending"}),
    "release": frozenset({"pending"}),
    "flush": frozenset({"pending"}),
}
_STATE: Final[dict[RowStatus, str]] = {
    "pending": "it is pending",
    "inflight": "it is inflight, its outcome is not known yet: wait for it",
    "done": "it is done, the broker accepted it",
    "dead": "it is dead",
    "aborted": "it is aborted, an operator retired it before: see `postroom outbox inspect`",
}


def why_not(verb: Verb, status: RowStatus, *, held: bool) -> str | None:
    """Return why a row's state forbids `verb`, as the end of a sentence; None where it does not."""
    if status not in _STATES[verb]:
        return _STATE[status]
    if verb == "release" and not held:
        return "it is not held"
    if verb == "hold" and held:
        return "it is held already"
    if verb == "flush" and held:
        return "it is held: release it"
    return None


def _require(row: _Row, verb: Verb) -> None:
    why = why_not(verb, row.status, held=bool(row.held))
    if why is not None:
        raise wrong_state(verb, row.id, why)


def _require_outcome(row: _Row, verb: Verb, order: Order) -> str:
    """Refuse a row that the broker may have accepted; where that is forced, return what the log says of it."""
    if row.unanswered_at is None:
        return ""
    if not order.force:
        raise unanswered(verb, row.id, order.doubt or "it was posted again meanwhile")
    return ", forced: the broker may have accepted it"


def _abort(transaction: Transaction, row: _Row, successor: str | None) -> None:
    transaction.execute(_QUERIES["abort"], {"seq": row.seq, "now": transaction.now, "successor": successor})
    transaction.changed(row.status, "aborted", 1, row.room)


def _move(transaction: Transaction, row: _Row, lane: int, next_attempt_at: int) -> None:
    transaction.execute(_QUERIES["move"], {"seq": row.seq, "lane": lane, "next_attempt_at": next_attempt_at})


def log(transaction: Transaction, verb: str, order: Order, row_id: str | None, detail: str | None = None) -> None:
    """Write a line of the operator log."""
    line = {"at": transaction.now, "verb": verb, "actor": str(order.caller), "reason": order.reason.strip()}
    transaction.execute(_QUERIES["log"], {**line, "row_id": row_id, "detail": detail})
