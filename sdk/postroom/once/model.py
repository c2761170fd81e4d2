"""The words of the idempotency registry: scopes, states, answers to a worker, errors, and what a store of keys can do.

    (none) ──▶ PENDING ──▶ COMMITTED
                 ▲  │
                 │  ▼
                FAILED

A `PENDING` key is renewed by its owner, or taken over once its lease has run out. `COMMITTED` is the end: its result is
what every later attempt is given (docs/contract/delivery.md#delivery-69 to delivery-74).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

from postroom.errors import Conflict, InvalidMessage, NotFound, PostroomError, Unavailable

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


class Store(Protocol):
    """One table of keys. Whether a lease has run out is decided by the store's own clock, within the step.

    A step that can't be taken raises `Unavailable`; it may have happened all the same. Taking `renew`, `commit` or
    `fail` again with the same owner is harmless.
    """

    async def take(self, scope: Scope, owner: str, lease: float) -> Row | None:
        """Make a free key `PENDING` for `owner`, for `lease` seconds; None where it is not free.

        A key is free where there is none, where it `FAILED`, and where its lease has run out. That attempt's last error
        is then `lease_expired`.
        """
        ...

    async def look(self, scope: Scope) -> Row | None:
        """Return the key as it is."""
        ...

    async def renew(self, scope: Scope, owner: str, lease: float) -> datetime | None:
        """Let the lease that `owner` still has run for `lease` seconds from now; None where it has none."""
        ...

    async def commit(self, scope: Scope, owner: str, result: Result) -> bool:
        """Make a key that `owner` still has a lease on `COMMITTED`; say whether it did."""
        ...

    async def fail(self, scope: Scope, owner: str, error: str) -> bool:
        """Make a key that `owner` still has a lease on `FAILED`; say whether it did."""
        ...

    async def purge(self, age: float, limit: int) -> int:
        """Delete up to `limit` keys that ended more than `age` seconds ago: settled, or left to their lease's end."""
        ...

    async def find(self, wanted: KeyFilter, limit: int) -> list[KeptKey]:
        """Return up to `limit` of the keys that are wanted: those that ended last, or whose lease ends last, first."""
        ...

    async def forget(self, scope: Scope, actor: str, reason: str) -> bool:
        """Delete a key that nobody has a lease on, and keep who wanted it and why; say whether it did."""
        ...

    async def forgotten(self, scope: Scope) -> list[Forgotten]:
        """Return when operators had this key forgotten, in order."""
        ...

    async def close(self) -> None:
        """Let go of the store. A second call does nothing."""
        ...


class KeyHeld(Conflict):
    """Another worker holds the key and did not end in time: try the message again, `retry_after` at the latest."""

    @classmethod
    def by_another(cls, scope: Scope, held: Held) -> KeyHeld:
        """Build the error for a key that stayed `held`."""
        return cls.of(
            "key_held",
            f"{scope} is held by another worker until {held.until:%Y-%m-%dT%H:%M:%SZ}: try again",
            retryable=True,
            retry_after=held.seconds,
        )


class LeaseLost(Conflict):
    """The lease ran out, or somebody else settled the key: what this worker did is not recorded as done."""

    @classmethod
    def of_scope(cls, scope: Scope) -> LeaseLost:
        """Build the error for `scope`."""
        detail = (
            f"the lease on {scope} has expired: this worker can no longer settle it, and another may have taken it over"
        )
        return cls.of("lease_lost", detail)


def absent(where: str) -> NotFound:
    """Build the error for a place where nobody has begun to keep keys."""
    detail = f"there is no registry in {where}: the first program that opens it creates it"
    return NotFound.of("registry_absent", detail)


def unavailable(error: BaseException) -> Unavailable:
    """Build the error for a store that can't be reached just now."""
    detail = f"the registry cannot be reached ({type(error).__name__}: {error}): try again"
    return Unavailable.of("registry_unavailable", detail, retryable=True)


def unusable(why: str) -> PostroomError:
    """Build the error for a store that somebody has to put right first."""
    return PostroomError.of("registry_unusable", f"the registry cannot be used: {why}")


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
