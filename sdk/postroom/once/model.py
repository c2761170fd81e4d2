"""The types of the idempotency registry: scopes, states, answers to a worker, errors, and the store of keys.

    (none) ──▶ PENDING ──▶ COMMITTED
                 ▲  │
                 │  ▼
                FAILED

A `PENDING` key is renewed by its owner, or taken over once its lease has run out. `COMMITTED` is final: every later
attempt gets its result (docs/contract/delivery.md#delivery-69 to delivery-74).
"""

import asyncio
import os
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol, Self, TypeAlias

from postroom._wire.once import KeptKey, KeyNote, KeysQuery, KeyState
from postroom._wire.sql import load_queries, why_failed
from postroom._wire.words import CANNOT_STORE, NOT_STORABLE
from postroom.claims import Claim as Run
from postroom.claims import Claims, Done, Held, Key, Result, Row, Table
from postroom.errors import Conflict, InvalidMessage, NotFound, PostroomError, Unavailable

__all__ = ["Begun", "Done", "Held", "KeyHeld", "LeaseLost", "Result", "Run", "Scope", "Store"]

Begun: TypeAlias = Run | Done | Held

COLUMNS: Final = ("tenant", "topic", "consumer_group", "key")
PARTS: Final = load_queries("postroom.once", "sql/claims.sql")
MAX_NAME: Final = 255  # characters of a tenant, a topic, a group
MAX_KEY: Final = 512  # characters
MAX_ERROR: Final = 2000  # characters


def table(name: str) -> Table:
    """Describe a registry's table of keys, which has this name."""
    return Table(name, COLUMNS, "lease_until", "begun_at", expired="lease_expired", given=("state",))


def state_of(row: Row) -> KeyState:
    """Name the state of a key."""
    if row.done:
        return "COMMITTED"
    return "PENDING" if row.lease_until else "FAILED"


@dataclass(frozen=True)
class Scope:
    """What is done once: `key` in a topic of a tenant, by its producer (`group` is None) or by one group of consumers.

    A producer's commit says nothing about the consumers, and each group works for itself. An empty tenant is a tenant;
    an empty `key` means no idempotency: nothing is recorded. Raises `InvalidMessage` for a name that can't be stored.
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
            if not isinstance(value, str):
                raise _invalid(name, f"must be text, not {type(value).__name__}")
            if len(value) > most:
                raise _invalid(name, f"has {len(value)} characters, at most {most} are allowed")
            if NOT_STORABLE.search(value):
                raise _invalid(name, CANNOT_STORE)
        if self.group == "":
            raise _invalid("group", "must not be empty: omit it for the scope of the producer")

    @property
    def columns(self) -> Key:
        """The key as in its table, where '' is the group of the producer."""
        return self.tenant, self.topic, self.group or "", self.key

    def __str__(self) -> str:
        who = "" if self.group is None else f" for the group {self.group}"
        return f"the key {self.key[:64]!r} of {self.tenant}/{self.topic}{who}"


class Store(Claims, Protocol):
    """A table of keys: their claims, and what operators and the retention do with them.

    A step that can't be taken raises `Unavailable`; it may have happened all the same.
    """

    async def now(self) -> datetime:
        """Return the time, by the clock that its keys' times are taken from."""

    async def purge(self, age: float, limit: int) -> int:
        """Delete up to `limit` keys that ended more than `age` seconds ago: settled, or left to their lease's end."""

    async def find(self, wanted: KeysQuery) -> list[KeptKey]:
        """Return the keys that are wanted, latest end (or end of the lease) first."""

    async def forget(self, scope: Scope, actor: str, reason: str) -> bool:
        """Delete a key without a lease, and log the actor and the reason; return whether it did."""

    async def forgotten(self, scope: Scope) -> list[KeyNote]:
        """Return the operations that deleted this key, in order."""

    async def close(self) -> None:
        """Close the store. A second call, or one in a forked process, does nothing."""


class KeyHeld(Conflict):
    """Another worker holds the key and did not end in time: try the message again, `retry_after` at the latest."""


class LeaseLost(Conflict):
    """The lease ran out, or another worker settled the key: what this worker did is not recorded as done."""

    @classmethod
    def of_scope(cls, scope: Scope) -> Self:
        """Build the error for `scope`."""
        detail = f"the lease on {scope} has expired: another worker may have taken it over: try again"
        return cls.of("lease_lost", detail)


def absent(where: str) -> NotFound:
    """Build the error for a place without a registry."""
    detail = f"there is no registry in {where}: check its address; the first program that opens it creates it"
    return NotFound.of("registry_absent", detail)


def check_process(opened_in: int | None) -> None:
    """Raise `RuntimeError` for a closed store (None), and in a forked process: its connections are the parent's."""
    if opened_in != os.getpid():
        raise RuntimeError("this registry is closed, or was opened before a fork: open one in this process")


def check_loop(used: asyncio.AbstractEventLoop | None) -> asyncio.AbstractEventLoop:
    """Return the running event loop; raises `RuntimeError` unless the store is used in it, or was not used before.

    The leases are renewed in the loop where they are held, and a pool's connections are of one loop.
    """
    loop = asyncio.get_running_loop()
    if used not in (None, loop):
        raise RuntimeError("this registry belongs to another event loop: open one in this loop")
    return loop


def unavailable(error: BaseException) -> Unavailable:
    """Build the error for a store that can't be reached just now."""
    detail = f"the registry cannot be reached ({why_failed(error)}): try again"
    return Unavailable.of("registry_unavailable", detail, retryable=True)


def unusable(why: str) -> PostroomError:
    """Build the error for a store that an operator has to repair first."""
    return PostroomError.of("registry_unusable", f"the registry cannot be used, and must be repaired: {why}")


def _invalid(name: str, why: str) -> InvalidMessage:
    return InvalidMessage.of(f"invalid_{name}", f"the {name} {why}", field=name)
