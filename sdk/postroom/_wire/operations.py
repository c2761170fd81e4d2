"""An operator's requests to a daemon: bodies, queries of the outbox and relay routes (docs/contract/send.md#send-14).

`{id}` in a path is a row's id or a `client_message_id`. Every change needs a `reason`, which goes into the operator
log.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from postroom._wire.message import Id, SendRequest, To
from postroom._wire.moment import FIRST, Moment, check_moments
from postroom._wire.names import REASON
from postroom._wire.sends import MAX_PAGE, RowStatus

Verb = Literal["requeue", "abort", "hold", "release", "flush"]

MAX_REASON: Final = 1000  # characters
MAX_WAIT: Final = 60.0  # seconds that one look-up may wait
MAX_IDS: Final = 10_000  # ids that one bulk request may name, and rows after which its answer ends with a cursor

Reason = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REASON, pattern=REASON.schema)]
Age = Annotated[float, msgspec.Meta(ge=0, le=10_000_000_000)]  # seconds, some three centuries at most


class Aged(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Conditions on the age of what a filter selects; `before` is a moment, and needs nobody's clock."""

    older_than_seconds: Age | None = None
    before: Moment | None = None

    def __post_init__(self) -> None:
        check_moments(before=self.before)

    def latest(self, now: datetime) -> datetime | None:
        """Return the time before which the conditions hold; None where they hold always."""
        if self.older_than_seconds is None:
            return self.before
        old_enough = now - timedelta(seconds=self.older_than_seconds)
        return old_enough if self.before is None else min(old_enough, self.before)


class Recent(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Conditions on when something happened; `last_seconds` are counted back by the clock that noted it."""

    last_seconds: Age | None = None
    since: Moment | None = None

    def __post_init__(self) -> None:
        check_moments(since=self.since)

    def earliest(self, now: datetime) -> datetime:
        """Return the time from which on the conditions hold; the first of all where they always hold."""
        since = FIRST if self.since is None else self.since
        return since if self.last_seconds is None else max(since, now - timedelta(seconds=self.last_seconds))


class _Conditions(Aged, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Conditions on rows, by the time of `enqueued_at`; a row has to match every field that is set."""

    status: RowStatus | None = None
    destination: To | None = None
    code: str | None = None  # the problem code in `last_error`
    held: bool | None = None


class RowFilter(_Conditions, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which rows a list or a bulk verb selects; a row has to match every field that is set."""

    ids: Annotated[list[str], msgspec.Meta(max_length=MAX_IDS)] | None = None


class ListQuery(_Conditions, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/outbox`; `cursor` is the `next_cursor` of the page before."""

    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = 100


class ExportQuery(_Conditions, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/outbox/export`, which answers with every row at once.

    The row of the id `export` itself is at `/v1/outbox/%65xport`.
    """


class WaitQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/sends/{client_message_id}`: seconds to wait for `done`, `dead` or `aborted`."""

    wait: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT)] = 0.0


class SendsQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of `POST /v1/sends`: the ids, and the seconds to wait until each is `done`, `dead` or `aborted`."""

    client_message_ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MAX_PAGE)]
    wait: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT)] = 0.0


class ReasonRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of a verb on one row: why."""

    reason: Reason


class AbortRequest(ReasonRequest, kw_only=True, omit_defaults=True):
    """The body of an abort: why, and whether to abort even if the broker may have accepted the message."""

    force: bool = False


class RequeueRequest(AbortRequest, kw_only=True, omit_defaults=True):
    """The body of a requeue: a fresh id is minted unless `new_client_message_id` gives one.

    `message` is a whole new message, without an id of its own; if it is absent, the row's message is sent again.
    With `force` it is sent again even if the broker may have accepted it.
    """

    new_client_message_id: Id | None = None
    message: SendRequest | None = None


class RowVerb(NamedTuple):
    """What an operator may do to a row: in which states, and its effect; each needs a reason.

    `held` says whether the row must be held, or must not be (None: either), `done` is the participle, `body` the body
    of the route on one row, and `urges` whether the relay has to look for work at once.
    """

    states: frozenset[RowStatus]
    held: bool | None
    effect: str
    done: str
    body: type[ReasonRequest] = ReasonRequest
    urges: bool = False

    @property
    def retires(self) -> bool:
        """Whether the row is never posted again."""
        return issubclass(self.body, AbortRequest)


_RETIRED: Final[frozenset[RowStatus]] = frozenset({"pending", "dead"})
_MOVED: Final[frozenset[RowStatus]] = frozenset({"pending"})

VERBS: Final[Mapping[Verb, RowVerb]] = MappingProxyType(
    {
        "requeue": RowVerb(
            _RETIRED,
            None,
            "Retire dead or pending rows and send their messages again, each under a fresh id.",
            "requeued",
            RequeueRequest,
        ),
        "abort": RowVerb(_RETIRED, None, "Retire dead or pending rows without a successor.", "aborted", AbortRequest),
        "hold": RowVerb(_MOVED, False, "Keep pending rows back until they are released.", "held"),
        "release": RowVerb(_MOVED, True, "Release held rows.", "released"),
        "flush": RowVerb(
            _MOVED, False, "Try waiting rows now, without the rest of their backoff.", "flushed", urges=True
        ),
    }
)
"""What routes, methods, commands and `why_not` follow from; `EFFECTS` of outbox/operations.py does each."""


class BulkRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a verb on many rows; with `dry_run` nothing changes and the answer says what would change.

    `cursor` is the `next_cursor` of the previous answer; `force` is for requeue and abort.
    """

    reason: Reason
    filter: RowFilter
    force: bool = False
    dry_run: bool = False
    cursor: str | None = None


class PruneRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Delete the payload of `done` and `aborted` rows that are older than this; the rows themselves stay.

    Without an age it is `outbox.keep_payloads` of the daemon. `cursor` is the `next_cursor` of the previous answer.
    """

    reason: Reason
    older_than_seconds: Age | None = None
    cursor: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0


class PruneResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How many payloads a prune deleted.

    One answer covers about 100,000 rows; if there are more, `next_cursor` continues with them.
    """

    pruned: int
    next_cursor: int | None = None


class ResendRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Send done rows that the broker's database lost again, under their own ids; with `dry_run` count them."""

    reason: Reason
    dry_run: bool = False


class ResendResult(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How many rows are pending again, or would be, and how many cannot be, since their payload was deleted.

    `without_payload_ids` are the client_message_ids of those, except in a dry run. One answer covers about 10,000 rows;
    `more` says that there are more.
    """

    dry_run: bool
    resent: int
    without_payload: int
    without_payload_ids: list[str] = []
    more: bool = False


class BackupRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Copy the whole outbox as it is, payloads too: to keep what waits beyond the loss of its disk."""

    reason: Reason


class PauseRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Pause the relay, or one destination; kept on disk until a resume."""

    reason: Reason
    destination: To | None = None


class ResumeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Resume the relay, with at most `rate_per_second` messages per second if given."""

    reason: Reason
    destination: To | None = None
    rate_per_second: Annotated[float, msgspec.Meta(gt=0)] | None = None
