"""What an operator does at a broker: to each noun the same requests, of which a `Noun` is the table.

    GET  /v1/<noun>              its query        → its page, some of the things, oldest first; `next_cursor` goes on
    GET  /v1/<noun>/{mesh}/{id}                   → its page, one thing whole
    GET  /v1/<noun>/log          MeshQuery        → its log, what operators did
    POST /v1/<noun>/<verb>       its change       → its result

Routes of the broker, calls of `BrokerClient`, commands and their help follow from the table. A verb means the things
that its filter matches, by ids or by what they are; with `dry_run` it only says which. Every change needs a `reason`,
which is kept with who did it, as the token says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

import msgspec

from postroom._wire.operations import Reason
from postroom.errors import Problem

Q = TypeVar("Q", bound=msgspec.Struct)  # a query
P = TypeVar("P", bound=msgspec.Struct)  # a page of things
L = TypeVar("L", bound=msgspec.Struct)  # a log
F = TypeVar("F")  # a filter
T = TypeVar("T")  # a thing

CHANGES = 500  # things after which the answer of one request ends with a cursor


class Verb(NamedTuple):
    """What an operator may do to a thing, as a sentence for help and documents, and what it is `done` to it then."""

    effect: str
    done: str


class Change(msgspec.Struct, Generic[F], kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of a verb: on what of which mesh, and why; with `dry_run` nothing changes.

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

    `unread` is why there may be more things than are known just now.
    """

    dry_run: bool
    done: list[T]
    failed: list[Failure]
    next_cursor: str | None = None
    unread: Problem | None = None


class Noun(NamedTuple, Generic[Q, P, L, F, T]):
    """A kind of things that operators see and change: its path, its types, its verbs, and who may use them."""

    path: str
    query: type[Q]
    page: type[P]
    log: type[L]
    change: type[Change[F]]
    result: type[Result[T]]
    verbs: Mapping[str, Verb]
    access: str = "mesh_admin"
