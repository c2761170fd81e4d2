"""Claims: which owner attempts what, until when, and what became of it; the same for every table that has them.

Here are the types, and what each table promises: the answer to a worker that asks for a key, and how an attempt at it
ends. `postgres` and `sqlite` are its two forms, and `leases` renews what a process holds.

    (none) ──▶ claimed ──▶ done, dead
                 ▲  │
                 │  ▼
               waiting

A key is free where it is new or waits, and where its lease has run out. Each claim counts an attempt. A lease ends by
the clock of the store that keeps it; its holder counts from before it asked, so that it lets go first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, Protocol, Self, TypeAlias

import msgspec

from postroom._wire.arguments import BYTES, to_json
from postroom._wire.words import value_fault
from postroom.errors import InvalidMessage

Key: TypeAlias = tuple[str, ...]  # the columns of a table's primary key
MAX_RESULT: Final = 1024 * 1024  # bytes


class Result(NamedTuple):
    """The result of an attempt, as it is kept for later claims."""

    encoding: Literal["json", "bytes"]
    data: bytes

    @classmethod
    def of(cls, value: Any) -> Self:
        """Encode `value`: bytes stay as they are, everything else is JSON.

        Raises `InvalidMessage` where JSON cannot express it, or it is larger than 1 MiB.
        """
        if isinstance(value, BYTES):
            result = cls("bytes", bytes(value))
        else:
            try:
                result = cls("json", to_json(value))
            except (TypeError, ValueError, RecursionError) as error:
                detail = f"the result can be stored neither as JSON nor as bytes: {value_fault(error)}"
                raise InvalidMessage.of("result_not_json", detail) from error
        if len(result.data) > MAX_RESULT:
            detail = f"the result has {len(result.data)} bytes, a registry keeps at most {MAX_RESULT}: keep a reference"
            raise InvalidMessage.of("result_too_large", detail)
        return result

    @property
    def value(self) -> Any:
        """The bytes, or the decoded JSON."""
        return self.data if self.encoding == "bytes" else msgspec.json.decode(self.data)


@dataclass(slots=True, eq=False)
class Claim:
    """Go ahead: the right to attempt what `key` names, until `until` unless it is renewed."""

    key: Key
    owner: str  # the token that fences what its holder does
    attempt: int  # 1 for the first
    last_error: str | None  # of the attempt before
    lease_until: datetime | None  # by the store's clock, as it was claimed; None: nothing is recorded
    until: float  # by the holder's clock; moved by each renewal


@dataclass(frozen=True, slots=True)
class Held:
    """Another owner attempts it, until `until` at least, unless that attempt ends before."""

    until: datetime
    seconds: float  # from now, by the store's clock


@dataclass(frozen=True, slots=True)
class Done:
    """It has had its effect, and left this result."""

    result: Result | None = None


@dataclass(frozen=True, slots=True)
class Later:
    """Not now: it is free for another attempt, `seconds` from now."""

    error: str
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Dead:
    """Never: it cannot be handled. `reason` is a snake_case word, `error` a sentence."""

    reason: str
    error: str
    attempts: int | None = None  # None: they were not counted


State: TypeAlias = Claim | Done | Dead | Held  # what a worker finds
Outcome: TypeAlias = Done | Later | Dead  # how its attempt ends
DONE: Final = Done()


class Ended(NamedTuple):
    """How an owner's attempt ended; one with an unreachable handler, or one too many, does not count."""

    key: Key
    owner: str
    outcome: Outcome
    counts: bool = True


class Row(NamedTuple):
    """A key as it is kept; `now` is the clock that decides whether a lease has run out."""

    done: bool
    dead_reason: str | None
    owner: str | None  # the one that holds it; a table may also keep the one that settled it
    attempts: int
    lease_until: datetime | None
    last_error: str | None
    result: Result | None
    now: datetime

    @property
    def state(self) -> Done | Dead | Held:
        """What it is to a worker that could not claim it; `Held` for 0 seconds where it is free by now."""
        if self.done:
            return Done(self.result)
        if self.dead_reason is not None:
            return Dead(self.dead_reason, self.last_error or "", self.attempts)
        until = self.lease_until or self.now
        return Held(until, max((until - self.now).total_seconds(), 0.0))


class Claims(Protocol):
    """One table of claims. Its own clock decides, within the step, whether a lease has run out.

    Each step takes any number of keys, and answers each in its place. Repeated by the same owner it is harmless.
    """

    async def claim(self, wanted: Sequence[Sequence[Any]], owner: str, lease: float) -> list[State]:
        """Begin an attempt at each key that is free, for `lease` seconds; return the state of every other.

        A row that is wanted is its key, and then the other columns of a new row. Of several that are the same, the
        first is claimed.
        """

    async def look_up(self, keys: Sequence[Key]) -> dict[Key, Row]:
        """Return the rows that exist."""

    async def renew(self, held: Sequence[tuple[Key, str]], lease: float) -> list[datetime | None]:
        """Prolong the leases that these owners still have, to `lease` seconds from now; None where one has ended."""

    async def settle(self, ended: Sequence[Ended]) -> list[bool]:
        """End attempts whose lease still holds; return whether it did."""


class Table(NamedTuple):
    """A table of claims: the names of its columns. Its own SQL (`parts`) says how else a row shows its state."""

    name: str
    key: Sequence[str]
    lease_until: str
    begun_at: str
    expired: str  # the last error of an attempt whose lease ran out
    given: Sequence[str] = ()  # the other columns of a new row
    owner: str = "text"  # its type

    def fill(self, steps: Mapping[str, str], parts: Mapping[str, str], **words: str) -> dict[str, str]:
        """Return the steps of a kind of database for this table, each as a query."""
        known = {name: part.split("\n", 2)[2].format_map(words) for name, part in parts.items()}
        names = {
            "table": self.name,
            "key": ", ".join(self.key),
            "known_key": ", ".join(f"known.{column}" for column in self.key),
            "columns": ", ".join((*self.key, *self.given)),
            "lease_until": self.lease_until,
            "begun_at": self.begun_at,
            "owner": self.owner,
        }
        return {name: step.format_map({**names, **words, **known}) for name, step in steps.items()}


def distinct_rows(wanted: Sequence[Sequence[Any]], table: Table) -> dict[Key, Sequence[Any]]:
    """Return the rows that are wanted by their keys."""
    return {tuple(row[: len(table.key)]): row for row in wanted}


def in_their_places(wanted: Sequence[Sequence[Any]], table: Table, states: dict[Key, State]) -> list[State]:
    """Return each one's state; of several that are the same, only the first gets the claim."""
    found = []
    for row in wanted:
        key = tuple(row[: len(table.key)])
        found.append(state := states[key])
        if isinstance(state, Claim) and state.lease_until is not None:
            states[key] = Held(state.lease_until, 0.0)
    return found
