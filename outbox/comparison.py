"""Done rows that the broker's database lost when it was restored to an earlier state: found by comparing, sent again.

A comparison is with one incarnation of the database, goes row by row, and is kept on disk: it continues after a
restart. Each batch is recorded in one transaction, so the missing rows are always those of the last comparison.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from outbox.model import Caller
from outbox.operations import Order, log
from outbox.relay import WalkedPast
from outbox.settled import text_of
from outbox.transaction import Transaction
from postroom._wire.sql import load_queries

_QUERIES: Final = load_queries("outbox", "sql/comparison.sql")
_SENT_AGAIN: Final = "the broker's database was restored to an earlier state, and has this message from another daemon"

_encode: Final = msgspec.json.Encoder().encode


def begin(incarnation: str, since: int, transaction: Transaction) -> None:
    """Compare the rows that are done now, and settled from `since` on (ms), with the database of that incarnation.

    What an earlier comparison found missing stays so until this one reaches it.
    """
    transaction.execute(_QUERIES["begin"], {"incarnation": incarnation, "since": since})


def note(
    incarnation: str,
    after: int,
    found: Sequence[tuple[int, str | None, int | None]],
    lost: Sequence[int],
    transaction: Transaction,
) -> None:
    """Record which rows of a stretch the database has and which it lacks, and how far the comparison is.

    Those that it has come with the ids that it has there, if it was this member's. Unless another comparison has begun.
    """
    values = {"incarnation": incarnation, "after": after}
    if transaction.execute(_QUERIES["compared"], values):
        transaction.execute(_QUERIES["found"], {"seqs": _encode([seq for seq, _, _ in found]).decode()})
        ids = {"found": _encode([each for each in found if each[1]]).decode()}
        order = Order(Caller.this_process(), _SENT_AGAIN)
        for row_id, *was in transaction.db.execute(_QUERIES["other_ids"], ids).fetchall():
            log(transaction, "compare", order, row_id, _was(*was))
        transaction.execute(_QUERIES["take_ids"], ids)
        transaction.execute(_QUERIES["lost"], {"seqs": _encode(lost).decode()})


class _Found(NamedTuple):
    """What `next` returns, in its order."""

    seq: int
    id: str | None
    broker_message_id: str | None
    history_id: int | None
    pruned_id: str | bytes | None  # of a row whose payload was pruned, as it is stored
    pruned_client_message_id: str | bytes | None


class Resent(NamedTuple):
    """What `resend` did: the row ids that are pending again, the client_message_ids whose payload was pruned."""

    row_ids: list[str]
    without_payload: list[str]
    after: int | None  # the row to go on after; None at the end


def resend(after: int, limit: int, order: Order, walked: WalkedPast, transaction: Transaction) -> Resent:
    """Send the next missing rows again under their own ids, each with its line in the operator log.

    One whose payload was pruned is only noted there.
    """
    parameters = {"after": after, "limit": limit}
    found = [_Found(*row) for row in transaction.db.execute(_QUERIES["next"], parameters)]
    kept = {row.seq: row.id for row in found if row.id is not None}
    pruned = [text_of(row.pruned_client_message_id) for row in found if row.pruned_client_message_id is not None]
    values = {"seqs": _encode(list(kept)).decode(), "now": transaction.now}
    room = transaction.value(_QUERIES["room"], values)
    transaction.changed("done", "pending", transaction.execute(_QUERIES["resend"], values), -room)
    transaction.execute(_QUERIES["found"], {"seqs": _encode([row.seq for row in found]).decode()})
    walked.forget()
    for row in found:
        if row.id is not None:
            log(transaction, "resend", order, row.id, _was(row.broker_message_id, row.history_id))
        elif row.pruned_id is not None:
            log(transaction, "resend", order, text_of(row.pruned_id), "not sent: its payload was pruned")
    return Resent(list(kept.values()), pruned, found[-1].seq if len(found) == limit else None)


def _was(broker_message_id: str | None, history_id: int | None) -> str:
    return f"was {broker_message_id}, history_id {history_id}"
