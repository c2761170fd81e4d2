"""What daemons, brokers and workers report of themselves: the types of `/v1/programs`.

The rule is docs/contract/operate.md#operate-60. What is wrong with a program is said here, for whoever shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from postroom._wire.nouns import Noun

REPORT_SECONDS: Final = 10.0  # between two reports of a program that is as it was
AWAY_SECONDS: Final = 3 * REPORT_SECONDS  # without a report, after which a program counts as away
LOW_DISK_BYTES: Final = 1024**3
CLOCK_SECONDS: Final = 60.0  # by which a clock may differ: an event that is further ahead is refused

Kind = Literal["daemon", "broker", "worker"]
MAX_LINE: Final = 1000  # characters
MAX_REASONS: Final = 20

Status = Literal["ok", "degraded", "unavailable"]
Line = Annotated[str, msgspec.Meta(max_length=MAX_LINE)]
Reasons = Annotated[list[Line], msgspec.Meta(max_length=MAX_REASONS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Time = Annotated[datetime, msgspec.Meta(tz=True)]


class ProgramPart(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """A part of a worker: publishing, a consumer, an agent. `reasons` keep it from working; it runs `flows`."""

    name: Name
    reasons: Reasons = []
    flows: Annotated[list[Name], msgspec.Meta(max_length=1000)] = []


class Report(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What a program says of itself, `at` a time of its own clock: the body of `POST /v1/programs`.

    `address` is its socket, or the URL of its pages. `waiting` rows of a daemon are `pending` or `inflight`, the oldest
    from `oldest_at`; `relay` is the relay's state. `disk_free` bytes are left where it keeps them. `totals` are counted
    since it started: `queued` and `relayed` by a daemon, `accepted` by a broker, `published`, `handled` and
    `dead_lettered` by a worker.
    """

    host: Name
    pid: Count
    version: Name
    started_at: Time
    at: Time
    status: Status
    reasons: Reasons = []
    address: Line | None = None
    waiting: Count | None = None
    dead: Count | None = None
    oldest_at: Time | None = None
    relay: Literal["starting", "relaying", "paused", "waiting", "stopped"] | None = None
    disk_free: Count | None = None
    totals: Annotated[dict[Name, Count], msgspec.Meta(max_length=20)] = {}
    parts: Annotated[list[ProgramPart], msgspec.Meta(max_length=1000)] = []


class Trouble(NamedTuple):
    """What is wrong, in a sentence, and a command that helps next."""

    what: str
    help: str


class Program(Report, kw_only=True, omit_defaults=True, frozen=True):
    """A program by its last report, which came at `reported_at`; it is `away` where the next ones did not come.

    A daemon is called by its member, and is of a mesh. Its clock was `clock_seconds` ahead of the database's.
    """

    kind: Kind
    name: str
    reported_at: datetime
    clock_seconds: float
    mesh: str | None = None
    away: bool = False

    def troubles(self) -> Iterator[Trouble]:
        """Yield what is wrong with it, each with a command that helps next."""
        unit = {"daemon": f"postroomd@{self.mesh or '*'}"}.get(self.kind, f"postroom-{self.kind}")
        log = f"journalctl -u {unit}  # on {self.host}"
        if self.away:
            yield Trouble(f"has not reported since {self.reported_at:%Y-%m-%d %H:%M:%S}Z", log)
            return
        for reason in self.reasons:
            yield Trouble(reason, "postroom doctor" if self.kind == "daemon" else log)
        for part in self.parts:
            for reason in part.reasons:
                kind, _, name = part.name.partition(" ")
                ways = {"publishing": "postroom worker backlog", "consumer": f"postroom consumer show {name}"}
                yield Trouble(f"{part.name}: {reason}", ways.get(kind, log))
        if self.relay == "paused":
            at = "" if self.address is None else f" --socket {self.address}"
            yield Trouble("the relay is paused by an operator", f"postroom relay resume{at}")
        if self.dead:
            at = "" if self.address is None else f" --socket {self.address}"
            yield Trouble(f"{self.dead} dead rows", f"postroom outbox list --status dead{at}")
        if self.disk_free is not None and self.disk_free < LOW_DISK_BYTES:
            yield Trouble(f"its disk has only {self.disk_free // 1024**2} MiB left", f"df -h  # on {self.host}")
        if abs(self.clock_seconds) > CLOCK_SECONDS:
            way = "ahead" if self.clock_seconds > 0 else "behind"
            yield Trouble(f"its clock is {abs(self.clock_seconds):.0f} s {way}", f"timedatectl  # on {self.host}")


class ProgramsQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/programs`: the daemons of one mesh, or without one everything that one may see."""

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
    access="reader",
)
