"""What an operator does at a broker: the same requests for each noun, as a table (`Noun`).

    GET  /v1/<noun>              its query        → its page, some of the things; `next_cursor` goes on
    GET  /v1/<noun>/<place>                       → one thing whole
    GET  /v1/<noun>/log          MeshQuery        → its log, what operators did
    GET  /v1/<noun>/counts                        → how many of them wait for an operator, in all meshes
    POST /v1/<noun>/<verb>       its change       → its result

Routes of the broker, calls of `BrokerClient`, commands and their help follow from the table. A verb applies to the
things that its filter matches, by ids or by other conditions; with `dry_run` it only lists them. Every change needs a
`reason`, which is kept with the token's owner in the operator log (docs/contract/operate.md#operate-37).
"""

from collections.abc import Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Annotated, Any, Final, Generic, NamedTuple, TypeAlias, TypeVar

import msgspec

from postroom._wire.administration import MAX_PAGE
from postroom._wire.operations import Reason, Recent
from postroom.errors import Conflict, InvalidMessage, Problem

Q = TypeVar("Q", bound=msgspec.Struct)  # a query
P = TypeVar("P", bound=msgspec.Struct)  # a page of things
W = TypeVar("W", bound=msgspec.Struct)  # a thing whole
L = TypeVar("L", bound=msgspec.Struct)  # a log
C = TypeVar("C", bound=msgspec.Struct)  # how many there are
F = TypeVar("F")  # a filter
T = TypeVar("T")  # a thing

_NONE: Any = None  # of a noun that has nothing of the kind, so that no route uses it
CHANGES = 500  # things after which the answer of one request ends with a cursor


class Verb(NamedTuple):
    """What an operator may do to a thing: its `effect`, a sentence for help and documents, and the participle `done`.

    `states` are those in which it may be done, empty for any. A `grave` one ends or stops something, and its button
    shows that. One that is `undoable` is reversed by another, so it is done to one thing without a confirmation.
    """

    effect: str
    done: str
    states: frozenset[str] = frozenset()
    grave: bool = False
    undoable: bool = False

    def check(self, verb: str, thing: str, state: str) -> None:
        """Raise `Conflict` where it may not be done to a `thing` in this `state`."""
        if self.states and state not in self.states:
            allowed = " or ".join(sorted(self.states))
            raise Conflict.of("wrong_state", f"cannot {verb} {thing}: it must be {allowed}, and is {state}")


class Change(msgspec.Struct, Generic[F], kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a verb: the `filter` of what it applies to, and the `reason`; with `dry_run` nothing changes.

    `cursor` is the `next_cursor` of the answer before.
    """

    reason: Reason
    filter: F
    mesh: str | None = None
    dry_run: bool = False
    cursor: str | None = None


class Failure(msgspec.Struct, kw_only=True):
    """A thing that a verb could not change, and why."""

    id: str
    problem: Problem


class Result(msgspec.Struct, Generic[T], kw_only=True, omit_defaults=True):
    """What a verb did, or with a dry run would do: `done` are the things, `failed` those that it could not change.

    `unread` is why there may be more things than could be found.
    """

    dry_run: bool
    done: list[T]
    failed: list[Failure]
    next_cursor: str | None = None
    unread: Problem | None = None


class Noun(NamedTuple, Generic[Q, P, W, L, C, F, T]):
    """A kind of things that operators see and change: its name, its path, its types, its verbs.

    `place` is the path of one thing, below `path`, `at` the query that says which. `reads` and `changes` are the access
    that its routes need (broker/authentication.py).
    """

    name: str
    things: str
    path: str
    query: type[Q]
    page: type[P]
    change: type[Change[F]] = _NONE
    result: type[Result[T]] = _NONE
    verbs: Mapping[str, Verb] = MappingProxyType({})
    reads: str = "look"
    changes: str = "repair"
    whole: type[W] = _NONE
    place: str = "{id}"
    at: type[msgspec.Struct] | None = None
    log: type[L] = _NONE
    counts: type[C] = _NONE


AnyNoun: TypeAlias = Noun[Any, Any, Any, Any, Any, Any, Any]


def invalid_cursor() -> InvalidMessage:
    """Return the error for a cursor that no list returned."""
    detail = "the cursor is not one that a list returned: begin again without one"
    return InvalidMessage.of("invalid_cursor", detail, field="cursor")


class LogQuery(Recent, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/operator_log`: which lines, the latest first; what is not set matches all.

    Lines of a `mesh` are those about it and what is in it; a token of one mesh implies it. A daemon has the same route
    for what was done to its rows (nouns `row`, `relay` and `outbox`).
    """

    mesh: str | None = None
    noun: str | None = None
    verb: str | None = None
    actor: str | None = None
    key: str | None = None
    cursor: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = 100


class LogLine(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Who did what (`verb`) to which thing (`noun`, `key`), the reason, and the outcome."""

    at: datetime
    actor: str
    verb: str
    noun: str
    key: str
    outcome: str
    reason: str | None = None


class LogPage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Lines of the log, the latest first."""

    lines: list[LogLine]
    next_cursor: int | None = None


OPERATOR_LOG: Final[Noun[LogQuery, LogPage, Any, Any, Any, Any, Any]] = Noun(
    "line", "what operators changed", "/v1/operator_log", LogQuery, LogPage
)
