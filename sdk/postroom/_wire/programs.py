"""What daemons, brokers and workers report of themselves: the types of `/v1/programs`, and of `/v1/minutes`.

The rules are docs/contract/operate.md#operate-60 and #operate-71. The sentences about what is wrong with a program, the
rates of programs and the summary of an hour are here, for the terminal and the console alike.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal, Protocol, get_args

import msgspec

from postroom._wire.moment import Moment, check_finite
from postroom._wire.nouns import Noun
from postroom._wire.sends import RelayState
from postroom._wire.words import counted, span, when

REPORT_SECONDS: Final = 10.0  # between two reports of a program whose state does not change
AWAY_SECONDS: Final = 3 * REPORT_SECONDS  # without a report, after which a program counts as away
LOW_DISK_BYTES: Final = 1024**3
CLOCK_SECONDS: Final = 60.0  # by which a clock may differ: an event that is further ahead is refused
LATENCIES: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 3600)  # seconds; bounds of counts

Kind = Literal["daemon", "broker", "worker"]
MAX_LINE: Final = 1000  # characters
MAX_REASONS: Final = 20

Status = Literal["ok", "degraded", "unavailable"]
Level = Literal["down", "wrong", "look"]  # the worst first
Line = Annotated[str, msgspec.Meta(max_length=MAX_LINE)]
Reasons = Annotated[list[Line], msgspec.Meta(max_length=MAX_REASONS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class ProgramPart(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """A part of a worker: publishing, a consumer, an agent. `reasons` keep it from working; it runs `flows`."""

    name: Name
    reasons: Reasons = []
    flows: Annotated[list[Name], msgspec.Meta(max_length=1000)] = []


class ReportHead(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Who reports, `at` a time of its own clock: what reports of every release have.

    `address` is its socket, or the URL of its pages. `oldest_at` is here because a report with a time outside the
    calendar is refused, whichever release it is of.
    """

    host: Name
    pid: Count
    version: Name
    started_at: Moment
    at: Moment
    address: Line | None = None
    oldest_at: Moment | None = None

    def __post_init__(self) -> None:
        check_finite(started_at=self.started_at, at=self.at, oldest_at=self.oldest_at)


class Report(ReportHead, kw_only=True, omit_defaults=True, frozen=True):
    """What a program says of itself: the body of `POST /v1/programs`.

    `waiting` rows of a daemon are `pending` or `inflight`, the oldest from `oldest_at`; `relay` is the relay's state.
    `disk_free` bytes are left where it keeps them. `totals` are counted since it started: `queued` and `relayed` by a
    daemon, `accepted` by a broker, `published`, `handled` and `dead_lettered` by a worker, and of what it handled
    `handled_in_<n>` how many took no longer than the bound number n of `LATENCIES`, from 0, and longer than the one
    before.
    """

    status: Status
    reasons: Reasons = []
    waiting: Count | None = None
    dead: Count | None = None
    relay: RelayState | None = None
    disk_free: Count | None = None
    totals: Annotated[dict[Name, Count], msgspec.Meta(max_length=20)] = {}
    parts: Annotated[list[ProgramPart], msgspec.Meta(max_length=1000)] = []


class Trouble(msgspec.Struct, frozen=True):
    """What is wrong with a thing, in a sentence, and the command that helps next.

    `down` is what does not run or cannot be reached, `wrong` what runs with a fault; the rest waits for an operator to
    `look` at it.
    """

    thing: str
    what: str
    help: str
    level: Level


class Watched(Protocol):
    """Anything that can report its own troubles."""

    def troubles(self) -> Iterator[Trouble]:
        """Yield what is wrong with it."""


def troubles_of(things: Iterable[Watched]) -> list[Trouble]:
    """Return what is wrong with any of the things."""
    return [trouble for one in things for trouble in one.troubles()]


def worst_first(troubles: Iterable[Trouble]) -> list[Trouble]:
    """Sort what is wrong by its level."""
    return sorted(troubles, key=lambda trouble: get_args(Level).index(trouble.level))


class Program(Report, kw_only=True, omit_defaults=True, frozen=True):
    """A program by its last report, which came at `reported_at`; it is `away` where later ones did not come.

    A daemon has the name of its member, and a mesh. Its clock was `clock_seconds` ahead of the database's.
    """

    kind: Kind
    name: str
    reported_at: datetime
    clock_seconds: float
    mesh: str | None = None
    away: bool = False

    @property
    def title(self) -> str:
        """How it is named to people: `alice@demo` for a daemon."""
        return self.kind if self.mesh is None else f"{self.name}@{self.mesh}"

    @property
    def counts(self) -> dict[str, int]:
        """Its totals since it started, with the rows that wait and are dead now."""
        now = {"waiting": self.waiting, "dead": self.dead}
        return self.totals | {name: value for name, value in now.items() if value is not None}

    @property
    def journal(self) -> str:
        """The command that shows the log of its unit."""
        unit = f"postroomd@{self.mesh}" if self.kind == "daemon" else f"postroom-{self.kind}"
        return f"journalctl -u {unit}  # on {self.host}"

    def troubles(self) -> Iterator[Trouble]:
        """Yield what is wrong with it."""
        thing, log = f"{self.title} on {self.host}", self.journal
        here = "" if self.address is None else f" --socket {shlex.quote(self.address)}"
        if self.away:
            yield Trouble(thing, f"no report since {when(self.reported_at)}", log, "down")
            return
        for reason in self.reasons:
            yield Trouble(thing, reason, log, "down" if self.status == "unavailable" else "wrong")
        for part in self.parts:
            kind, _, name = part.name.partition(" ")
            ways = {"publishing": "postroom worker backlog", "consumer": f"postroom consumer show {name}"}
            for reason in part.reasons:
                level: Level = "look" if kind == "consumer" else "wrong"
                yield Trouble(thing, f"{part.name}: {reason}", ways.get(kind, log), level)
        if self.relay == "paused":
            remedy = f"postroom relay resume --reason 'it was paused'{here}"
            yield Trouble(thing, "an operator paused its relay", remedy, "wrong")
        if self.dead:
            yield Trouble(thing, counted(self.dead, "dead row"), f"postroom outbox list --status dead{here}", "look")
        if self.disk_free is not None and self.disk_free < LOW_DISK_BYTES:
            left = f"its disk has only {self.disk_free // 1024**2} MiB left"
            yield Trouble(thing, left, f"df -h  # on {self.host}", "wrong")
        if abs(self.clock_seconds) > CLOCK_SECONDS:
            way = "ahead" if self.clock_seconds > 0 else "behind"
            off = f"its clock is {abs(self.clock_seconds):.0f} s {way}"
            yield Trouble(thing, off, f"timedatectl  # on {self.host}", "wrong")


class Rates:
    """How fast the counts of programs grow, per second, by the last two reports of each."""

    def __init__(self) -> None:
        self._last: dict[tuple[object, ...], Program] = {}
        self._rates: dict[tuple[object, ...], dict[str, float]] = {}

    def see(self, programs: Iterable[Program]) -> None:
        """Take in the current reports; a program that is missing or away has no rate."""
        last, rates = self._last, self._rates
        self._last, self._rates = {}, {}
        for one in programs:
            if one.away:
                continue
            process = one.kind, one.mesh, one.name, one.host, one.address, one.started_at
            before = last.get(process, one)
            seconds = (one.at - before.at).total_seconds()
            self._last[process] = one
            if seconds > 0:
                earlier = before.counts
                self._rates[process] = {
                    name: (value - earlier.get(name, 0)) / seconds for name, value in one.counts.items()
                }
            elif process in rates:
                self._rates[process] = rates[process]

    def of(self, name: str) -> float | None:
        """Return the rate of all programs together; None while no two reports have come."""
        found = [rates[name] for rates in self._rates.values() if name in rates]
        return sum(found) if found else None


class ProgramsQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/programs`: the daemons of one mesh, or without one all that the caller may see."""

    mesh: str | None = None


class ProgramPage(msgspec.Struct, kw_only=True):
    """The programs by kind, mesh and name."""

    programs: list[Program]


PROGRAMS: Final[Noun[ProgramsQuery, ProgramPage, Any, Any, Any, Any, Any]] = Noun(
    "program",
    "daemons, brokers and workers by their last report",
    "/v1/programs",
    ProgramsQuery,
    ProgramPage,
    reads="reader",
)


class MinutesQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/minutes`: the last so many, up to the current one."""

    last: Annotated[int, msgspec.Meta(ge=1, le=1440)] = 60


class Minute(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What brokers accepted and workers did in the minute that began `at`, as their reports counted it.

    Of what consumers, webhooks and agents handled, half took at most `p50` seconds and all but a hundredth `p99`, from
    when it happened; both are estimated from counts.
    """

    at: datetime
    accepted: int = 0
    handled: int = 0
    dead_lettered: int = 0
    p50: float | None = None
    p99: float | None = None


def hour_in_words(minutes: Sequence[Minute]) -> dict[str, str]:
    """Describe an hour: of each count its sum and its highest minute, of each latency the last one and the longest."""
    said = {}
    for name in ("accepted", "handled", "dead_lettered"):
        counts = [getattr(one, name) for one in minutes]
        said[name] = f"{sum(counts):,}, at most {max(counts):,} in a minute" if any(counts) else "none"
    for name in ("p50", "p99"):
        known = [seconds for one in minutes if (seconds := getattr(one, name)) is not None]
        said[name] = f"{span(known[-1])}, at most {span(max(known))}" if known else "-"
    return said


class MinutePage(msgspec.Struct, kw_only=True):
    """Minutes in order, the last of them the current one."""

    minutes: list[Minute]


MINUTES: Final[Noun[MinutesQuery, MinutePage, Any, Any, Any, Any, Any]] = Noun(
    "minute",
    "what was accepted, handled and dead-lettered in each of the last minutes, and how long it took",
    "/v1/minutes",
    MinutesQuery,
    MinutePage,
    reads="broker_look",
)
