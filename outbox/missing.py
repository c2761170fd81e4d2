"""Done rows that the broker's database lost, since it came back older than it was: found by comparing, sent again.

A comparison is with one incarnation of the database, goes row by row, and is kept on disk: a restart goes on with it.
Each batch is written down in one transaction, so that what is missing is what the last comparison says.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from outbox.model import Caller
from outbox.operating import Order, log
from outbox.relaying import WalkedPast
from outbox.settled import text_of
from outbox.transaction import Transaction
from postroom._wire.sql import load_queries

_QUERIES: Final = load_queries("outbox", "sql/missing.sql")
_SENT_AGAIN: Final = "the broker's database came back older, and has this message from another daemon"

_encode: Final = msgspec.json.Encoder().encode


def begin(incarnation: str, since: int, transaction: Transaction) -> None:
    """Compare the rows that are done now, and settled from `since` on (ms), with the database of that incarnation.

    What an earlier comparison found missing stays so until this one comes to it.
    """
    transaction.execute(_QUERIES["begin"], {"incarnation": incarnation, "since": since})


class Note(NamedTuple):
    """Write down which rows of a stretch the database has and has not, and how far the comparison is."""

    incarnation: str
    after: int
    found: Sequence[tuple[int, str | None, int | None]]  # with the ids that it has there, where they are the caller's
    lost: Sequence[int]

    @property
    def rows(self) -> int:
        """How many rows it may write."""
        return len(self.found) + len(self.lost) + 1

    def run(self, transaction: Transaction) -> None:
        """Write it, unless another comparison has begun."""
        values = {"incarnation": self.incarnation, "after": self.after}
        if transaction.execute(_QUERIES["compared"], values):
            transaction.execute(_QUERIES["found"], {"seqs": _encode([seq for seq, _, _ in self.found]).decode()})
            ids = {"found": _encode([each for each in self.found if each[1]]).decode()}
            order = Order(Caller.this_process(), _SENT_AGAIN)
            for row_id, *was in transaction.db.execute(_QUERIES["other_ids"], ids).fetchall():
                log(transaction, "compare", order, row_id, _was(*was))
            transaction.execute(_QUERIES["take_ids"], ids)
            transaction.execute(_QUERIES["lost"], {"seqs": _encode(self.lost).decode()})


class _Found(NamedTuple):
    """What `next` returns, in its order."""

    seq: int
    id: str | None
    broker_message_id: str | None
    history_id: int | None
    gone_id: str | bytes | None  # as it is kept where the payload is gone
    gone_client_message_id: str | bytes | None


class Resent(NamedTuple):
    """What a `Resend` did: the row ids that are pending again, the client_message_ids that have no payload any more."""

    row_ids: list[str]
    without_payload: list[str]
    after: int | None  # the row to go on after; None at the end


class Resend(NamedTuple):
    """Send the next missing rows again under their own ids; those whose payload is gone are only noted in the log."""

    after: int
    limit: int
    order: Order
    walked: WalkedPast

    @property
    def rows(self) -> int:
        """How many rows it may write."""
        return self.limit

    def run(self, transaction: Transaction) -> Resent:
        """Resend; each row has its line in the operator log."""
        parameters = {"after": self.after, "limit": self.limit}
        found = [_Found(*row) for row in transaction.db.execute(_QUERIES["next"], parameters)]
        kept = {row.seq: row.id for row in found if row.id is not None}
        gone = [text_of(row.gone_client_message_id) for row in found if row.gone_client_message_id is not None]
        values = {"seqs": _encode(list(kept)).decode(), "now": transaction.now}
        room = transaction.value(_QUERIES["room"], values)
        transaction.changed("done", "pending", transaction.execute(_QUERIES["resend"], values), -room)
        transaction.execute(_QUERIES["found"], {"seqs": _encode([row.seq for row in found]).decode()})
        self.walked.forget()
        for row in found:
            if row.id is not None:
                log(transaction, "resend", self.order, row.id, _was(row.broker_message_id, row.history_id))
            elif row.gone_id is not None:
                log(transaction, "resend", self.order, text_of(row.gone_id), "not sent: its payload was pruned")
        last = found[-1].seq if len(found) == self.limit else None
        return Resent(list(kept.values()), gone, last)


def _was(broker_message_id: str | None, history_id: int | None) -> str:
    return f"was {broker_message_id}, history_id {history_id}"
