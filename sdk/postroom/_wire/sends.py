"""The daemon's answers: the result of a send, its state, the rows that an operator sees, and received messages.

The last are the types of `/v1/inbox` and `/v1/events` (docs/contract/delivery.md#delivery-82).
"""

from datetime import datetime
from typing import Annotated, Final, Literal

import msgspec

from postroom._wire.administration import HistoryMessage
from postroom._wire.message import Priority, To
from postroom.errors import Problem

RowStatus = Literal["pending", "inflight", "done", "dead", "aborted"]
RelayState = Literal["starting", "relaying", "paused", "waiting", "stopped"]
SETTLED: frozenset[RowStatus] = frozenset({"done", "dead", "aborted"})
MAX_PAGE: Final = 1000  # rows or messages in one answer


class SendResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The body of a 202 or 200 to a send (docs/contract/send.md#send-37): the message is on disk.

    `duplicate` says that the row already existed: the same message had been sent under this id.
    """

    client_message_id: str
    outbox_id: str
    status: Literal["queued", "inflight", "done"]
    duplicate: bool = False
    broker_message_id: str | None = None
    history_id: int | None = None


class BatchResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of the answer to `POST /v1/send/batch`: the result of line `line` (from 1), or its problem."""

    line: int
    result: SendResult | None = None
    problem: Problem | None = None


class OutboxRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A row of the outbox as callers and operators see it: never its payload. Times are UTC.

    `duplicate` says that the broker had accepted the message before: by an earlier post, of this daemon or of another
    one of the same member. `unanswered_at` is when a post of it last went unanswered, for a row whose outcome is not
    known: the broker may have accepted it. `traceparent` is left out of lists.
    """

    id: str
    client_message_id: str
    status: RowStatus
    destination: str
    priority: Priority
    enqueued_at: datetime
    attempts: int
    next_attempt_at: datetime
    request_fingerprint: str  # first 8 bytes, hex
    payload_bytes: int
    held: bool = False
    not_before: datetime | None = None
    last_error: str | None = None
    delivered_at: datetime | None = None
    broker_message_id: str | None = None
    history_id: int | None = None
    duplicate: bool = False
    unanswered_at: datetime | None = None
    aborted_at: datetime | None = None
    aborted_by: str | None = None
    superseded_by: str | None = None
    payload_pruned_at: datetime | None = None
    submitted_by: str | None = None
    traceparent: str | None = None


class SendList(msgspec.Struct, kw_only=True):
    """The states of many sends, in the order of the request; `missing` are the ids without a send."""

    rows: list[OutboxRow]
    missing: list[str]


class OperatorAction(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of the append-only `operator_log`: who did what to which row, when and why."""

    at: datetime
    verb: str
    actor: str  # "uid 1000 (alice)"
    reason: str
    row_id: str | None = None
    detail: str | None = None


class FailedPosts(msgspec.Struct, kw_only=True):
    """Posts of a row, one after another, that the broker did not accept: `code` says why, as `last_error` begins.

    `interrupted` is one whose answer a crash of the daemon lost, found at the start after it.
    """

    row_id: str
    at: datetime  # when the last of them began
    seconds: float  # that it took
    code: str
    broker: str  # its address; "" where that is not known
    since: datetime  # when the first of them began
    times: int


class RowChain(msgspec.Struct, kw_only=True):
    """A row with all its predecessors and successors (`superseded_by`), oldest first, and what operators did.

    `failed_posts` is empty for a row that was accepted at its first post, or whose payload is deleted.
    """

    row: OutboxRow
    chain: list[OutboxRow]
    log: list[OperatorAction]
    failed_posts: list[FailedPosts] = []


MAX_ENDED: Final = 100  # rows in one report


class EndedRow(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A row that died or was retired, as its daemon reports it, or that turned out to be accepted (`done`).

    `successor` is the client_message_id of the row that superseded it.
    """

    row: OutboxRow
    log: list[OperatorAction] = []
    failed_posts: list[FailedPosts] = []
    successor: str | None = None


class EndedRows(msgspec.Struct, kw_only=True):
    """The body of the broker's `POST /v1/ended_rows`: rows of one member's daemon on `host`, the oldest end first."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    rows: Annotated[list[EndedRow], msgspec.Meta(max_length=MAX_ENDED)]


class OutboxPage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A page of rows; `next_cursor` continues it and is absent on the last page."""

    rows: list[OutboxRow]
    next_cursor: str | None = None


class BulkFailure(msgspec.Struct, kw_only=True):
    """A row that a bulk verb could not change, and why."""

    id: str
    code: str
    detail: str


class BulkResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a bulk verb did: `done` and `skipped` row ids, `failed` rows with reasons; with a dry run, what it would do.

    One answer covers at most about 10,000 rows; if there are more, `next_cursor` continues with them.
    """

    dry_run: bool
    matched: int
    done: list[str]
    skipped: list[str]
    failed: list[BulkFailure]
    next_cursor: str | None = None


class RelayStatus(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The state of the relay: `relaying`, `paused` (by an operator), `waiting` (backoff after `reason`)."""

    state: RelayState
    degraded: bool = False
    reason: str | None = None
    paused_destinations: list[str] = []
    rate_per_second: float | None = None
    last_success_at: datetime | None = None


class Health(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The body of `GET /v1/health`: `degraded` says why in `reasons`, one sentence each.

    `missing` counts the done rows that the broker's database lost when it was restored to an earlier state;
    `missing_without_payload` those of them that cannot be sent again. While `comparing`, not all are found yet.
    """

    status: Literal["ok", "degraded"]
    reasons: list[str]
    rows: dict[str, int]
    relay: RelayStatus
    oldest_pending_at: datetime | None = None
    wal_bytes: int = 0
    outbox_bytes: int = 0
    comparing: bool = False
    missing: int = 0
    missing_without_payload: int = 0


class Ready(msgspec.Struct, kw_only=True):
    """The body of a 200 to `GET /v1/ready`: a send would be accepted now, whatever the broker does."""

    ready: bool


class Version(msgspec.Struct, kw_only=True):
    """The body of `GET /v1/version`: the program, its version, and the mesh that it serves."""

    name: str
    version: str
    mesh: str


class InboxMessage(HistoryMessage, kw_only=True, omit_defaults=True):
    """A received message as the broker's history shows it, with its place in this daemon's inbox.

    `position` grows from message to message and is never used twice: it is the id of the event of `GET /v1/events`.
    """

    position: int
    received_at: datetime


class InboxQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/inbox`; `cursor` is the `next_cursor` of the previous page.

    `since` is an RFC 3339 time with an offset: messages received then or later.
    """

    sender: str | None = None
    destination: To | None = None
    since: datetime | None = None
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = 100


class InboxPage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A page of received messages, oldest first; `next_cursor` continues it and is absent on the last page.

    A page may have fewer messages than requested and still have a next one: its size in bytes is limited too. A reader
    that continues from a position lower than `deleted_to` has missed what retention deleted in between.
    """

    messages: list[InboxMessage]
    next_cursor: str | None = None
    deleted_to: int | None = None


class EventsQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/events`: which messages, and since when; without `since` only new ones.

    A `Last-Event-ID` header overrides `since`: the stream resumes after that message.
    """

    sender: str | None = None
    destination: To | None = None
    since: datetime | None = None
