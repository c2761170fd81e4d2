"""The words of the idempotency registry: scopes, states, answers to a worker (docs/contract/delivery.md#delivery-69).

    (none) ──▶ PENDING ──▶ COMMITTED
                 ▲  │
                 │  ▼
                FAILED

A `PENDING` key is renewed by its owner, or taken over once its lease has run out. `COMMITTED` is the end: its result is
what every later attempt is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import msgspec

from postroom.errors import InvalidMessage

State = Literal["PENDING", "COMMITTED", "FAILED"]
Encoding = Literal["json", "bytes"]

TRANSITIONS: Final[frozenset[tuple[State | None, State]]] = frozenset(
    {
        (None, "PENDING"),  # begin
        ("PENDING", "PENDING"),  # renew; begin, once the lease has run out
        ("PENDING", "COMMITTED"),  # commit
        ("PENDING", "FAILED"),  # fail
        ("FAILED", "PENDING"),  # begin
    }
)

LEASE_EXPIRED: Final = "lease_expired"  # the last error of an attempt that ended without a word
MAX_NAME: Final = 255  # characters of a tenant, a topic, a group
MAX_KEY: Final = 512  # characters
MAX_ERROR: Final = 2000  # characters
MAX_RESULT: Final = 1024 * 1024  # bytes


@dataclass(frozen=True)
class Scope:
    """What is done once: `key` in a topic of a tenant, by its producer (`group` is None) or by one group of consumers.

    A producer's commit says nothing about the consumers, and each group works for itself. An empty tenant is a tenant;
    an empty `key` means no idempotency: nothing is recorded. Raises `InvalidMessage` for a name that can't be kept.
    """

    tenant: str
    topic: str
    key: str
    group: str | None = None

    def __post_init__(self) -> None:
        for name, value, most in (
            ("tenant", self.tenant, MAX_NAME),
            ("topic", self.topic, MAX_NAME),
            ("key", self.key, MAX_KEY),
            ("group", self.group or "", MAX_NAME),
        ):
            _check(name, value, most)
        if self.group == "":
            raise _invalid("group", "must not be empty: omit it (None) for the scope of the producer")

    def __str__(self) -> str:
        who = "" if self.group is None else f" for the group {self.group}"
        return f"the key {self.key[:64]!r} of {self.tenant}/{self.topic}{who}"


class Result(NamedTuple):
    """The result of a committed key as it is kept."""

    encoding: Encoding
    data: bytes

    @classmethod
    def of(cls, value: Any) -> Result:
        """Encode `value`: bytes stay as they are, everything else is JSON.

        Raises `InvalidMessage` where JSON has no words for it, or it is larger than 1 MiB.
        """
        result = cls("bytes", bytes(value)) if isinstance(value, (bytes, bytearray)) else cls("json", _json(value))
        if len(result.data) > MAX_RESULT:
            detail = f"the result has {len(result.data)} bytes, a registry keeps at most {MAX_RESULT}: keep a reference"
            raise InvalidMessage.of("result_too_large", detail)
        return result

    @property
    def value(self) -> Any:
        """What a later attempt is given: the bytes, or what JSON kept of the value."""
        return self.data if self.encoding == "bytes" else msgspec.json.decode(self.data)


class Row(NamedTuple):
    """A key as a store shows it; `now` is the store's clock, which alone decides whether a lease has run out."""

    state: State
    owner: str  # who holds it, or who settled it
    attempts: int
    lease_until: datetime | None  # set where PENDING
    last_error: str | None
    result: Result | None  # set where COMMITTED
    now: datetime


class KeyFilter(NamedTuple):
    """Which keys an operator means; None: any. The group '' is the producer's scope."""

    tenant: str | None = None
    topic: str | None = None
    group: str | None = None
    state: State | None = None


class KeptKey(NamedTuple):
    """A key as an operator sees it, without its result."""

    scope: Scope
    state: State
    owner: str
    attempts: int
    begun_at: datetime  # the last attempt
    lease_until: datetime | None  # set where PENDING
    settled_at: datetime | None  # set where COMMITTED or FAILED
    last_error: str | None


class Forgotten(NamedTuple):
    """That an operator had a key forgotten: who, why, and what it was then."""

    at: datetime
    actor: str
    reason: str
    state: State
    attempts: int


class Run(NamedTuple):
    """Go ahead: the key is yours until `lease_until` (None: the key is empty, and nothing is recorded)."""

    owner: str  # the token that fences `renew`, `commit` and `fail`
    attempt: int  # 1 for the first
    last_error: str | None  # of the attempt before
    lease_until: datetime | None


class Done(NamedTuple):
    """It was done before, with this result."""

    result: Result


class Held(NamedTuple):
    """Somebody else is at it, and holds the key until `until` at least, unless it settles before."""

    until: datetime
    seconds: float  # from now, by the store's clock


Begun = Run | Done | Held


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        detail = f"the result can be stored neither as JSON nor as bytes: {error}"
        raise InvalidMessage.of("result_not_json", detail) from error


def _check(name: str, value: str, most: int) -> None:
    if len(value) > most:
        raise _invalid(name, f"has {len(value)} characters, at most {most} are allowed")
    if "\0" in value or any("\ud800" <= character <= "\udfff" for character in value):
        raise _invalid(name, "contains a NUL or a lone surrogate, which no database can store")


def _invalid(name: str, why: str) -> InvalidMessage:
    return InvalidMessage.of(f"invalid_{name}", f"the {name} {why}", field=name)
