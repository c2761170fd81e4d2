"""The accept table (docs/contract/send.md#send-37): what a send is answered, by its id's row and its content.

The single and the batch route answer from here: `DestinationRule` hands in what the config allows
(docs/contract/send.md#send-19), and `answer` says what the row means that the outbox found, or inserted where there was
none. To a caller of another uid every cell says the same, and nothing about the row (docs/contract/send.md#send-40).
"""

import asyncio
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, Literal, NamedTuple

from outbox import AcceptedRow, Caller, Outbox
from postroom._wire.fingerprint import prefix
from postroom._wire.message import PreparedSend
from postroom._wire.sends import RowStatus, SendResult
from postroom.errors import Conflict, NotPermitted, PostroomError


class Kept(NamedTuple):
    """The cell of a send that is kept: the HTTP status and what the caller is told."""

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


class Answered(NamedTuple):
    """What a kept send is told; `replayed` where the row was there before."""

    http_status: int
    result: SendResult
    replayed: bool


def answer(row: AcceptedRow, send: PreparedSend, caller: Caller) -> Answered | PostroomError:
    """Look the row up in the table and return what its sender is told."""
    if row.inserted:
        return Answered(
            202, SendResult(client_message_id=send.client_message_id, outbox_id=row.row_id, status="queued"), False
        )
    if row.submitted_uid != caller.uid:
        return Conflict.of(
            CODE,
            "this id is taken: use a new one",
            conflict=OTHER_CALLER.conflict,
            request_fingerprint=prefix(send.fingerprint),
        )
    cell = TABLE[row.status, row.fingerprint == send.fingerprint]
    if isinstance(cell, Taken):
        since = datetime.fromtimestamp(row.enqueued_at / 1000, UTC).isoformat(timespec="milliseconds")
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


class DestinationRule:
    """Allows what matches one of its shell patterns, such as `topic:orders*`; without patterns everything."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = tuple(patterns)
        self._matches = lru_cache(maxsize=1024)(lambda to: any(fnmatchcase(to, each) for each in self._patterns))

    def check(self, destination: str) -> None:
        """Raise `NotPermitted` (403) for a destination that the config does not allow."""
        if not self.allows(destination):
            raise _refusal(destination)

    def accept(
        self, outbox: Outbox, sends: Sequence[PreparedSend], caller: Caller
    ) -> Awaitable[list[AcceptedRow | PostroomError]]:
        """Accept the sends that the config allows; one that is on disk already is answered, whatever it allows now.

        The others have their refusal (403) in their place.
        """
        return self._accept_allowed(outbox, sends, caller) if self._patterns else outbox.accept(sends, caller)

    async def _accept_allowed(
        self, outbox: Outbox, sends: Sequence[PreparedSend], caller: Caller
    ) -> list[AcceptedRow | PostroomError]:
        allowed = [send for send in sends if self.allows(send.destination)]
        others = [send for send in sends if not self.allows(send.destination)]
        rows = await asyncio.gather(  # both before what the caller sends later
            outbox.accept(allowed, caller), outbox.known(others, caller)
        )
        accepted, known = iter(rows[0]), iter(rows[1])
        return [
            next(accepted) if self.allows(send.destination) else next(known) or _refusal(send.destination)
            for send in sends
        ]

    def allows(self, destination: str) -> bool:
        """Tell whether callers may send there."""
        return not self._patterns or self._matches(destination)


def _refusal(destination: str) -> NotPermitted:
    detail = f"this daemon may not send to {destination}: add it to allow_destinations in its config"
    return NotPermitted.of("destination_not_allowed", detail, field="to")
