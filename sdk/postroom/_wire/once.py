"""Keys of `postroom.once` in the broker's database: what an operator sees of them, and can do.

The rule is docs/contract/delivery.md#delivery-75. It is for operators of every mesh: a key's tenant need not be a mesh.
"""

from datetime import datetime
from typing import Annotated, Any, Final, Literal

import msgspec

from postroom._wire.administration import MAX_PAGE
from postroom._wire.nouns import CHANGES, Change, Noun, Result, Verb
from postroom._wire.words import when
from postroom.errors import Conflict, NotFound

KeyState = Literal["PENDING", "COMMITTED", "FAILED"]


class KeysQuery(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/once`: which keys; the group '' is the producer's scope."""

    tenant: str | None = None
    topic: str | None = None
    group: str | None = None
    state: KeyState | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE + 1)] = 100


class KeyName(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key; without a group, of the producer's scope. Also the query string of `GET /v1/once/key`."""

    tenant: str
    topic: str
    key: str
    group: str | None = None


class KeptKey(msgspec.Struct, kw_only=True, frozen=True):
    """A key as an operator sees it, without its result."""

    tenant: str
    topic: str
    group: str | None
    key: str
    state: str
    owner: str
    attempts: int
    begun_at: datetime  # the last attempt
    lease_until: datetime | None  # set where PENDING
    settled_at: datetime | None  # set where COMMITTED or FAILED
    last_error: str | None


class KeyPage(msgspec.Struct, kw_only=True):
    """Keys, latest first by the end of the key or of its lease."""

    keys: list[KeptKey]


class KeyNote(msgspec.Struct, kw_only=True, frozen=True):
    """An operator's forgetting of a key: who, why, and the key's state before."""

    verb: str
    at: datetime
    actor: str
    reason: str
    state: str
    attempts: int


class KeyDetails(msgspec.Struct, kw_only=True, frozen=True):
    """A key with its result, as text, and what operators did to it; one that is forgotten has no state."""

    tenant: str
    topic: str
    group: str | None
    key: str
    state: str | None = None
    owner: str | None = None
    attempts: int | None = None
    lease_until: datetime | None = None
    last_error: str | None = None
    result: str | None = None
    encoding: str | None = None
    log: list[KeyNote] = []


class KeyNames(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The keys that a verb applies to."""

    keys: Annotated[list[KeyName], msgspec.Meta(min_length=1, max_length=CHANGES)]


KEYS: Final[Noun[KeysQuery, KeyPage, KeyDetails, Any, Any, KeyNames, KeyName]] = Noun(
    "key",
    "keys of things done once, latest first",
    "/v1/once",
    KeysQuery,
    KeyPage,
    Change[KeyNames],
    Result[KeyName],
    {
        "forget": Verb(
            "Delete a key, so that its work can be done again: the next delivery of its message does it.",
            "forgotten",
            grave=True,
        )
    },
    reads="broker_look",
    changes="broker_repair",
    whole=KeyDetails,
    place="key",
    at=KeyName,
)


def key_missing(what: str) -> NotFound:
    """Return the error for a missing key; `what` names it, as `the key 'k-1' of acme/orders`."""
    detail = f"there is no {what.removeprefix('the ')}: `postroom once list` lists them"
    return NotFound.of("key_missing", detail)


def key_held(what: str, owner: str, until: datetime | None) -> Conflict:
    """Return the error for a key that a worker holds, `until` the end of its lease where that is known."""
    lease = "" if until is None else f" until {when(until)}"
    advice = "forget it once that has ended, or stop the worker and wait for the end of its lease"
    return Conflict.of("key_held", f"{what} is held by {owner.rpartition('/')[0]}{lease}: {advice}")
