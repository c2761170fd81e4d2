"""Operators' verbs on rows: each is one operation with a reason, and one line of the operator log.

The rules begin at docs/contract/send.md#send-83. A verb that the row's state forbids is a `Conflict` that says why.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, Self

import msgspec

from outbox import errors
from outbox.model import DUE, HELD, Accepted, Caller, Unanswered
from outbox.relay import WalkedPast, report
from outbox.settled import find_row, find_send, unpack
from outbox.transaction import Transaction, room_of
from postroom._wire import spans
from postroom._wire.message import PreparedSend, Priority
from postroom._wire.moment import to_milliseconds
from postroom._wire.operations import VERBS, Verb
from postroom._wire.sends import RowStatus
from postroom._wire.sql import load_queries

_QUERIES: Final = load_queries("outbox", "sql/operations.sql")
_UNANSWERED: Final[tuple[RowStatus, ...]] = ("pending", "dead")  # the states of a row that may be unanswered
_RESUMED: Final = 1000  # rows that a resume makes due; the others wait until their time, a minute at most as a rule

LookUp = Callable[[Sequence[Unanswered]], Awaitable[Sequence[Accepted | None]]]
"""Asks the broker for rows: in their order, what it has of each, None where it does not have it.

Raises `PostroomError` where it cannot be asked, or where a post of one of them may still be under way there.
"""

_encode: Final = msgspec.json.Encoder().encode
_decode_ids: Final = msgspec.json.Decoder(list[str]).decode


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
    """The caller of a verb, and its reason; with `force` also for a row that the broker may have accepted.

    `doubt` is why it is not known whether the broker has it.
    """

    caller: Caller
    reason: str
    force: bool = False
    doubt: str | None = None

    def checked(self) -> Self:
        """Return the order; raises `InvalidMessage` where it gives no reason."""
        if not self.reason.strip():
            raise errors.reason_missing()
        return self


class Act(NamedTuple):
    """Do a verb to a row; a requeue's successor may have a chosen id, and a patched message."""

    verb: Verb
    row_id: str
    order: Order
    walked: WalkedPast
    new_client_message_id: str | None = None
    patch: PreparedSend | None = None
    rows: int = 2

    def run(self, transaction: Transaction) -> str:
        """Do it; returns the row's id, for a requeue the successor's."""
        seq = find_row(transaction.db, self.row_id)
        if seq is None:
            raise errors.row_not_found(self.row_id)
        row = _Row(*transaction.db.execute(_QUERIES["get"], {"seq": seq}).fetchone())
        row = row._replace(id=unpack(row.id), client_message_id=unpack(row.client_message_id))
        if self.verb == "requeue" and row.pruned and self.patch is None:
            raise errors.payload_pruned(row.id, row.status)
        why = why_not(self.verb, row.status, held=bool(row.held), early=(row.not_before or 0) > transaction.now)
        if why is not None:
            raise errors.wrong_state(self.verb, row.id, why)
        forced = None
        if VERBS[self.verb].retires and row.unanswered_at is not None:
            if not self.order.force:
                raise errors.unanswered(self.verb, row.id, self.order.doubt or "it was posted again meanwhile")
            forced = "forced: the broker may have accepted it"
        came, detail = EFFECTS[self.verb](self, transaction, row)
        log(transaction, self.verb, self.order, row.id, ", ".join(filter(None, (detail, forced))) or None)
        return came

    def requeue(self, transaction: Transaction, row: _Row) -> tuple[str, str | None]:
        """Retire the row and write its successor; returns its id, and the detail for the log."""
        fresh, successor = transaction.new_ids(2)
        client_message_id = self.new_client_message_id or fresh
        if find_send(transaction.db, client_message_id, transaction.salt) is not None:
            raise errors.id_taken(client_message_id)
        patch = self.patch
        payload, size = (patch.payload, len(patch.payload)) if patch else (None, row.payload_bytes)
        if room_of(size) - row.room > max(0, transaction.headroom):
            raise errors.outbox_full(transaction.max_bytes)
        _abort(transaction, row, successor)
        priority = patch.priority if patch else row.priority
        not_before = row.not_before
        if patch is not None and patch.not_before is not None:
            not_before = to_milliseconds(patch.not_before)
        due = max(transaction.now, not_before or 0)
        if patch is None and spans.wanted():
            kept = transaction.value(_QUERIES["payload_of"], (row.seq,))
            payload = _in_a_trace_of_its_own(kept, client_message_id)
        values = {
            "seq": row.seq,
            "number": transaction.next_seq,
            "id": successor,
            "client_message_id": client_message_id,
            "fingerprint": patch.fingerprint if patch else None,
            "now": transaction.dated,
            "next_attempt_at": due,
            "lane": HELD if row.held else transaction.lane(priority, due),
            "priority": priority,
            "destination": patch.destination if patch else None,
            "not_before": not_before,
            "payload": payload,
            "payload_bytes": size,
        }
        transaction.execute(_QUERIES["succeed"], values)
        transaction.execute(_QUERIES["succeed_payload"], values)
        transaction.next_seq = None
        transaction.added(1, size, room_of(size))
        return successor, f"superseded by {successor} ({client_message_id})" + (", patched" if patch else "")

    def abort(self, transaction: Transaction, row: _Row) -> tuple[str, str | None]:
        """Retire the row without a successor."""
        _abort(transaction, row, None)
        return row.id, None

    def hold(self, transaction: Transaction, row: _Row) -> tuple[str, str | None]:
        """Keep the row from being claimed."""
        return self._move(transaction, row, HELD, row.next_attempt_at)

    def release(self, transaction: Transaction, row: _Row) -> tuple[str, str | None]:
        """Let the row wait for its next attempt again."""
        return self._move(transaction, row, transaction.lane(row.priority, row.next_attempt_at), row.next_attempt_at)

    def flush(self, transaction: Transaction, row: _Row) -> tuple[str, str | None]:
        """Make the row due."""
        return self._move(transaction, row, DUE[row.priority], transaction.now)

    def _move(self, transaction: Transaction, row: _Row, lane: int, due: int) -> tuple[str, str | None]:
        transaction.execute(_QUERIES["move"], {"seq": row.seq, "lane": lane, "next_attempt_at": due})
        if lane != HELD:
            self.walked.forget()
        return row.id, None


EFFECTS: Final[Mapping[Verb, Callable[[Act, Transaction, _Row], tuple[str, str | None]]]] = MappingProxyType(
    {"requeue": Act.requeue, "abort": Act.abort, "hold": Act.hold, "release": Act.release, "flush": Act.flush}
)
"""What each verb does to a row; returns the id of the resulting row, and the detail for the log."""


def _in_a_trace_of_its_own(payload: bytes, client_message_id: str) -> bytes:
    """Return the payload of a successor: the same, except for a `traceparent`, which becomes that of the requeue."""
    to, before = msgspec.structs.astuple(spans.carried_by(payload))
    if before is None:
        return payload
    head, _, tail = payload.rpartition(before.encode())  # the last one: `meta` may have the same text
    return head + spans.requeued(to, client_message_id, before).encode() + tail


class Control(NamedTuple):
    """Pause or resume the relay, or set its rate, for a destination ('' for all)."""

    destination: str
    paused: bool
    rate_per_second: float | None
    order: Order
    walked: WalkedPast
    rows: int = _RESUMED

    def run(self, transaction: Transaction) -> None:
        """Store it; rows that wait for their next attempt are due once the relay is resumed."""
        values = {"destination": self.destination, "paused": self.paused, "rate_per_second": self.rate_per_second}
        transaction.execute(_QUERIES["set_control"], values)
        if not self.paused:
            wanted = {"destination": self.destination, "now": transaction.now, "limit": _RESUMED}
            transaction.execute(_QUERIES["resume"], wanted)
            self.walked.forget()
        rate = f", {self.rate_per_second:g}/s" if self.rate_per_second is not None else ""
        detail = f"relay of {self.destination or 'everything'}{rate}"
        log(transaction, "pause" if self.paused else "resume", self.order, None, detail)


_STATE: Final[dict[RowStatus, str]] = {
    "pending": "it is pending",
    "inflight": "it is inflight, its outcome is not known yet: wait for it",
    "done": "it is done, the broker accepted it",
    "dead": "it is dead",
    "aborted": "it is aborted, an operator retired it before",
}


def why_not(verb: Verb, status: RowStatus, *, held: bool, early: bool = False) -> str | None:
    """Return why a row's state forbids `verb`, as the end of a sentence; None where it does not.

    A row is `early` while its `not_before` has not come.
    """
    allowed = VERBS[verb]
    if status not in allowed.states:
        return _STATE[status]
    if allowed.held is not None and allowed.held != held:
        return "it is not held" if allowed.held else "it is held: release it"
    return "its `not_before` has not come" if allowed.urges and early else None


def _abort(transaction: Transaction, row: _Row, successor: str | None) -> None:
    transaction.execute(_QUERIES["abort"], {"seq": row.seq, "now": transaction.now, "successor": successor})
    transaction.changed(row.status, "aborted", 1, row.room)
    report(transaction, [row.id])


def reported(numbers: Sequence[int], transaction: Transaction) -> None:
    """Forget the ends with these numbers: they were reported to the broker."""
    transaction.execute(_QUERIES["reported"], (_encode(numbers).decode(),))


def log(transaction: Transaction, verb: str, order: Order, row_id: str | None, detail: str | None = None) -> None:
    """Write a line of the operator log."""
    line = {"at": transaction.now, "verb": verb, "actor": str(order.caller), "reason": order.reason.strip()}
    transaction.execute(_QUERIES["log"], {**line, "row_id": row_id, "detail": detail})


class Learned(NamedTuple):
    """What the broker has, by the ids of the rows, which are done now; and why it could not be asked, if so."""

    accepted: dict[str, Accepted]
    doubt: str | None = None


def learn(asked: Sequence[Unanswered], found: Sequence[Accepted | None], transaction: Transaction) -> list[str]:
    """Record what the broker answered, and return the ids of the rows that are done now.

    A row that was posted again since it was asked for is left alone.
    """
    answers = list(zip(asked, found, strict=True))
    accepted = _encode([(row.row_id, row.unanswered_at, *one) for row, one in answers if one is not None]).decode()
    absent = _encode([(row.row_id, row.unanswered_at) for row, one in answers if one is None]).decode()
    for status in _UNANSWERED:
        values = {"found": accepted, "status": status, "now": transaction.now}
        room = transaction.value(_QUERIES["room"], values)
        transaction.changed(status, "done", transaction.execute(_QUERIES["accepted"], values), room)
    transaction.execute(_QUERIES["not_accepted"], {"absent": absent})
    done = _decode_ids(transaction.value(_QUERIES["done_of"], {"found": accepted}))
    report(transaction, done)
    return done
