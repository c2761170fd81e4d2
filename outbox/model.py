"""The outbox's types: its settings, the values that it takes and returns, and the lanes in which rows wait.

The five states are docs/contract/send.md#send-51. `held` and `not_before` are separate columns.
"""

import os
from enum import StrEnum
from typing import Annotated, Final, NamedTuple, Self

import msgspec
from msgspec import Meta

from postroom._wire.message import Priority
from postroom._wire.sends import RowStatus
from postroom.chassis.ownership import user_name
from postroom.chassis.sqlite import Schema

NAME: Final = "outbox"  # of its files
SCHEMA: Final = Schema.of("outbox", "PSTR", own_page=15)  # that of `outbox_salt`
DUE: Final[dict[Priority, int]] = {"now": 0, "next": 1, "low": 2}  # the lanes that a claim takes from, in this order
WAITING: Final = 3  # the lane of rows that wait until next_attempt_at
HELD: Final = 4  # the lane of rows that an operator has to release
LANES: Final = (*DUE.values(), WAITING, HELD)


class OutboxSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The limits of one outbox: the section `[outbox]` of the daemon's config."""

    max_bytes: Annotated[
        int,
        Meta(
            ge=1024 * 1024,
            description="Room for waiting rows (pending, inflight and dead), in bytes of the file: a "
            "warning at 80 %, new messages are refused (507) at 95 %. Done and aborted "
            "rows never count: when all rows together "
            "need more than 90 %, the payloads of the oldest of those are deleted.",
        ),
    ] = 2 * 1024 * 1024 * 1024
    keep_payloads: Annotated[
        float,
        Meta(
            ge=0,
            le=36_500,
            description="How long the payloads of done and aborted rows are kept while there is room, in days. About "
            "140 bytes of each such row stay forever (id, fingerprint, outcome), in addition to `max_bytes`.",
        ),
    ] = 7
    max_group_rows: Annotated[
        int, Meta(ge=1, le=10_000, description="Messages that may share a transaction; a large one counts as several.")
    ] = 1000
    checkpoint_bytes: Annotated[
        int,
        Meta(
            ge=4096,
            le=32 * 1024 * 1024,
            description="About how much the write-ahead log gathers, in bytes, before it is moved into the file: less "
            "makes shorter and more frequent pauses.",
        ),
    ] = 1024 * 1024


class Caller(NamedTuple):
    """The user that sent a message or used a verb: the socket peer's uid and gid.

    As a text it has the name of the user too. A directory of users that does not answer holds that up, so no send asks.
    """

    uid: int
    gid: int
    name: str | None = None  # in the place of the user's

    @classmethod
    def this_process(cls) -> Self:
        """Return the user that this process runs as."""
        return cls(os.getuid(), os.getgid())

    def __str__(self) -> str:
        name = self.name or user_name(self.uid)
        return f"uid {self.uid}" + (f" ({name})" if name else "")


class Existing(NamedTuple):
    """The row that holds an id, in the columns that a repeated send is answered from."""

    seq: int
    client_message_id: str
    row_id: str
    status: RowStatus
    fingerprint: str  # hex
    destination: str
    enqueued_at: int
    submitted_by: str
    broker_message_id: str | None
    history_id: int | None
    last_error: str | None


class ClaimedRow(NamedTuple):
    """A row that the relay holds: `inflight` until it is settled, or until the next start."""

    row_id: str
    client_message_id: str
    fingerprint: bytes
    payload: bytes  # an encoded `postroom._wire.message.Envelope`
    destination: str
    attempts: int  # before this one
    age_from: int  # ms since the epoch: enqueued, or later by not_before, a resend or a clock that was behind
    not_before: int = 0  # ms since the epoch


class Verdict(StrEnum):
    """How a settlement ends an `inflight` row."""

    DONE = "done"
    DEAD = "dead"
    RETRY = "pending"


class Settlement(NamedTuple):
    """The relay's outcome for one claimed row; it only affects a row that is still `inflight`.

    `RETRY` makes it due again after `wait_ms`, and counts the attempt where it `burns_attempt`. `duplicate` is a `DONE`
    row that the broker had accepted before. `answered` says whether the broker answered for the row (True), was sent it
    and did not (False: it may have been accepted), or was not sent it (None).
    """

    row_id: str
    verdict: Verdict
    broker_message_id: str | None = None
    history_id: int | None = None
    last_error: str | None = None
    wait_ms: int = 0
    burns_attempt: bool = True
    duplicate: bool = False
    answered: bool | None = None


class Post(NamedTuple):
    """One request to a broker that rows were sent in."""

    at: int  # when it began, in ms since the epoch
    took: int  # ms
    broker: str  # its address


class Unanswered(NamedTuple):
    """A row that the broker was sent and did not answer for: it may have been accepted."""

    row_id: str
    client_message_id: str
    fingerprint: bytes
    unanswered_at: int  # ms since the epoch


class DoneRow(NamedTuple):
    """A row that the broker accepted, to be compared with what its database has."""

    seq: int
    client_message_id: str
    fingerprint: bytes


class Comparison(NamedTuple):
    """How far the done rows were compared with the broker's database, which its incarnation names."""

    incarnation: str
    since: int  # ms since the epoch: rows that settled before are not compared
    after: int  # the `seq` of the last row compared
    until: int  # the last row to compare

    @property
    def ended(self) -> bool:
        """Whether every row was compared."""
        return self.after == self.until


class Missing(NamedTuple):
    """How many done rows the broker's database lost, and how many of those cannot be sent again."""

    rows: int
    without_payload: int


class Accepted(NamedTuple):
    """What the broker has of a row that it accepted."""

    broker_message_id: str
    history_id: int


class OutboxCounts(NamedTuple):
    """Counters that are kept, without a scan: rows by status, bytes of payload kept, and the oldest pending row."""

    rows: dict[RowStatus, int]
    payload_bytes: int
    waiting_bytes: int  # of the file that pending, inflight and dead rows take: what max_bytes limits
    used_bytes: int  # of the file that hold something; the file itself never shrinks
    file_bytes: int
    wal_bytes: int
    oldest_pending_at: int | None  # ms since the epoch
    due_ms: int  # for how long the row has been due that has waited longest


class RelayControl(NamedTuple):
    """An operator's setting of the relay for one destination, or for everything."""

    paused: bool
    rate_per_second: float | None = None
