"""The accept table (docs/contract/send.md#send-37): what a send is answered, by its id's row and its content.

The daemon's single and batch routes answer from here, and so does `postroom.testing.FakeClient`: `answer` returns what
the row that was found or inserted under the id means. A caller of another uid gets the same answer from every cell, and
learns nothing about the row (docs/contract/send.md#send-40).
"""

from typing import Final, Literal, NamedTuple

import msgspec

from postroom._wire.fingerprint import prefix
from postroom._wire.message import PreparedSend
from postroom._wire.moment import from_milliseconds
from postroom._wire.sends import RowStatus, SendResult
from postroom.errors import Conflict, PostroomError


class AcceptedRow(msgspec.Struct, frozen=True, gc=False):
    """What the row under a send's id is, after the transaction that looked (and inserted it, where `inserted`).

    `fingerprint` is the row's frozen one: equal to the request's for a match (docs/contract/send.md#send-37).
    """

    inserted: bool
    row_id: str
    status: RowStatus
    fingerprint: bytes
    destination: str
    enqueued_at: int  # ms since the epoch
    submitted_uid: int
    broker_message_id: str | None = None
    history_id: int | None = None
    last_error: str | None = None


class Kept(NamedTuple):
    """The cell of a send that is kept: the HTTP status, and the `status` in the answer."""

    http_status: int
    status: Literal["queued", "inflight", "done"]


class Taken(NamedTuple):
    """The cell of an id that is taken: the `conflict`, and what else of the row it shows."""

    conflict: str
    shows_reason: bool = False
    shows_broker_message_id: bool = False


TABLE: Final[dict[tuple[RowStatus, bool], Kept | Taken]] = {
    # (the row's state, the fingerprints match)
    ("pending", True): Kept(202, "queued"),
    ("pending", False): Taken("outbox_pending_fingerprint_mismatch"),
    ("inflight", True): Kept(202, "inflight"),
    ("inflight", False): Taken("outbox_inflight_fingerprint_mismatch"),
    ("done", True): Kept(200, "done"),
    ("done", False): Taken("outbox_done_fingerprint_mismatch", shows_broker_message_id=True),
    ("dead", True): Taken("outbox_dead_fingerprint_match", shows_reason=True),
    ("dead", False): Taken("outbox_dead_fingerprint_mismatch"),
    ("aborted", True): Taken("outbox_aborted_fingerprint_match"),
    ("aborted", False): Taken("outbox_aborted_fingerprint_mismatch"),
}
OTHER_CALLER: Final = Taken("outbox_id_of_another_caller")
CODE: Final = "idempotency_key_reused"

_SENTENCE: Final = {
    "match": "this message was sent before under this id and is {status}: it cannot be sent again under this id",
    "mismatch": "another message was sent under this id before and is {status}: use a new id",
}


class Answered(msgspec.Struct, frozen=True, gc=False):
    """The answer to a kept send; `replayed` where the row already existed."""

    http_status: int
    result: SendResult
    replayed: bool


def answer(row: AcceptedRow, send: PreparedSend, uid: int) -> Answered | PostroomError:
    """Look the row up in the table and return the answer to its sender, the user `uid`."""
    if row.inserted:
        return Answered(
            202, SendResult(client_message_id=send.client_message_id, outbox_id=row.row_id, status="queued"), False
        )
    if row.submitted_uid != uid:
        return Conflict.of(
            CODE,
            "this id is taken: use a new one",
            conflict=OTHER_CALLER.conflict,
            request_fingerprint=prefix(send.fingerprint),
        )
    cell = TABLE[row.status, row.fingerprint == send.fingerprint]
    if isinstance(cell, Taken):
        since = from_milliseconds(row.enqueued_at).isoformat(timespec="milliseconds")
        return Conflict.of(
            CODE,
            _SENTENCE[cell.conflict.rpartition("_")[2]].format(status=row.status),
            conflict=cell.conflict,
            request_fingerprint=prefix(send.fingerprint),
            reason=row.last_error if cell.shows_reason else None,
            broker_message_id=row.broker_message_id if cell.shows_broker_message_id else None,
            since=since.replace("+00:00", "Z"),
            destination=row.destination,
        )
    result = SendResult(
        client_message_id=send.client_message_id, outbox_id=row.row_id, status=cell.status, duplicate=True
    )
    if cell.status == "done":
        result.broker_message_id = row.broker_message_id
        result.history_id = row.history_id
    return Answered(cell.http_status, result, True)
