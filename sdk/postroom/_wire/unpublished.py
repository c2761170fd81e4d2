"""Publishing and consumers as an operator sees them at a broker: what waits, what is refused, which consumers pause.

The rules begin at docs/contract/delivery.md#delivery-24. They are for operators of every mesh.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Any, Final

import msgspec

from postroom._wire.administration import MeshQuery
from postroom._wire.names import SNAKE
from postroom._wire.nouns import Change, Noun, Result, Verb
from postroom._wire.operations import Aged, Recent
from postroom._wire.programs import Trouble
from postroom.errors import Problem


class Failing(msgspec.Struct, frozen=True):
    """An event, a delivery or a replay whose last attempt failed; `behind` others of its aggregate wait for it."""

    id: str
    subject: str
    aggregate: str
    attempts: int
    error: str
    occurred_at: datetime
    next_attempt_at: datetime
    behind: int


class Dropped(msgspec.Struct, frozen=True):
    """An event, a delivery or a replay that an operator dropped permanently."""

    id: str
    subject: str
    aggregate: str
    error: str
    dropped_at: datetime
    dropped_by: str
    reason: str


class FailingPage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What fails, the oldest 1,000, and whether there is `more`; never a payload."""

    failing: list[Failing]
    more: bool = False


class DroppedLog(msgspec.Struct, kw_only=True):
    """What operators dropped most recently, the last 1,000, oldest first."""

    dropped: list[Dropped]


class RefusedFilter(Aged, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a drop applies to: by ids, or all with a subject and of an age."""

    ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1000)] | None = None
    subject: str | None = None


def _refused(thing: str, source: str) -> Noun[MeshQuery, FailingPage, Any, DroppedLog, Any, RefusedFilter, str]:
    drop = Verb("Permanently drop what fails, so that what waits behind it is published.", "dropped", grave=True)
    return Noun(
        thing,
        f"{source} that JetStream refuses",
        f"/v1/unpublished/{source}",
        MeshQuery,
        FailingPage,
        Change[RefusedFilter],
        Result[str],
        {"drop": drop},
        reads="broker_look",
        changes="broker_repair",
        log=DroppedLog,
    )


UNPUBLISHED: Final = {
    "events": _refused("event", "events"),
    "deliveries": _refused("delivery", "deliveries"),
    "replays": _refused("replay", "replays"),
}


class SourceBacklog(msgspec.Struct, frozen=True):
    """How much of a source waits to be published, and since when: docs/contract/delivery.md#delivery-20."""

    source: str
    count: int
    oldest_at: datetime | None
    failing: int

    def troubles(self) -> Iterator[Trouble]:
        """Yield what is wrong with it."""
        if self.failing:
            what = f"{self.source} that JetStream refuses: {self.failing:,}"
            yield Trouble("publishing", what, "postroom worker backlog", "wrong")


class SourcePage(msgspec.Struct, kw_only=True):
    """Every source: events, deliveries, letters and replays."""

    sources: list[SourceBacklog]


class PublishedFilter(Recent, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What was published `since` a time, or in the `last_seconds` before the first request, of which one is required.

    It is that into `stream`, or any; with `confirmed` also what is known to be handled.
    """

    stream: str | None = None
    confirmed: bool = False

    def __post_init__(self) -> None:
        Recent.__post_init__(self)
        if self.since is None and self.last_seconds is None:
            raise ValueError("Object missing required field `since`")

    def key(self, until: datetime) -> str:
        """Return the key of a redrive in the operator log, where its first request was at `until`."""
        return f"published into {self.stream or 'any stream'} since {self.earliest(until).isoformat()}"


class Redriven(msgspec.Struct, frozen=True):
    """How many messages of one source are published again, or would be."""

    source: str
    messages: int


SOURCES: Final[Noun[MeshQuery, SourcePage, Any, Any, Any, PublishedFilter, Redriven]] = Noun(
    "source",
    "what waits to be published, of each source",
    "/v1/sources",
    MeshQuery,
    SourcePage,
    Change[PublishedFilter],
    Result[Redriven],
    {
        "redrive": Verb(
            "Publish again what was published since a time and is not known to be handled; inboxes skip what they "
            "have.",
            "published again",
        )
    },
    reads="broker_look",
    changes="broker_repair",
)


def redriven(parts: Iterable[Redriven]) -> str:
    """Describe the outcome of a redrive for the log: `published again: events 2, letters 0`."""
    return f"{SOURCES.verbs['redrive'].done}: {', '.join(f'{one.source} {one.messages:,}' for one in parts)}"


class ConsumersQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/consumers`: those of one mesh's streams, or of all; their past in `last` minutes."""

    mesh: str | None = None
    last: Annotated[int, msgspec.Meta(ge=0, le=60)] = 0


class ConsumerFilter(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The consumers that a verb applies to: by name, of any stream, or of one as `STREAM/NAME`."""

    ids: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1000)]


class Pause(msgspec.Struct, kw_only=True, frozen=True):
    """A consumer, or a webhook's, that does not call its handler until that can be reached again."""

    consumer: str
    error: str


class Durable(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """A durable consumer, whether it runs or not: of an HTTP consumer, a webhook, an agent, a flow or an inbox.

    `waiting` messages are not delivered yet, `in_hand` are delivered and not acknowledged, of which `again` were
    delivered before; the oldest of all these is from `oldest_at`. `begun` are those that its record in Postgres, where
    it has one, shows as neither processed nor dead. `asks` says whether a process pulls its messages now, `seen_at`
    when it was last delivered one or acknowledged one, `still` that this was more than a minute ago or never, by the
    broker's clock. `past` are the messages that waited in each of the last minutes, as far as a worker saw it and where
    they were requested. `paused` is why it calls no handler: its handler cannot be reached, or the operator `paused_by`
    gave that reason.
    """

    consumer: str
    stream: str
    filters: list[str]
    waiting: int
    in_hand: int
    again: int
    asks: bool
    oldest_at: datetime | None = None
    seen_at: datetime | None = None
    still: bool = False
    begun: int = 0
    paused: str | None = None
    paused_by: str | None = None
    past: list[int] = []

    @property
    def id(self) -> str:
        """Its id in verbs."""
        return f"{self.stream}/{self.consumer}"

    @property
    def state(self) -> str:
        """Say in a few words whether it runs, and why not."""
        if self.paused_by is not None:
            return f"paused by {self.paused_by}: {self.paused}"
        if self.paused is not None:
            return f"paused: {self.paused}"
        if self.asks:
            return "running"
        return "full, or stopped: it asks for no messages" if self.in_hand else "stopped: it asks for no messages"

    def troubles(self) -> Iterator[Trouble]:
        """Yield what is wrong with it: it pauses, or messages wait and it does not ask for them.

        One that asks for no messages while it has some in hand is full, unless nothing has moved for a while.
        """
        stopped = (self.waiting or self.in_hand) and not self.asks and (self.still or not self.in_hand)
        if self.paused is not None or stopped:
            what = f"{self.waiting} waiting, {self.in_hand} in hand, {self.state}"
            help_ = f"postroom consumer show {self.consumer}" if self.paused_by is None else resuming(self.id)
            mesh = self.filters[0].removeprefix("cmd.").partition(".")[0]
            if SNAKE.allows(mesh):  # a filter such as `>` does not name it
                help_ += f" --mesh {mesh}"
            yield Trouble(f"consumer {self.consumer}", what, help_, "look")


def resuming(consumer: str) -> str:
    """Return the command that lets a consumer, as `STREAM/NAME`, go on after an operator's pause."""
    return f"postroom consumer resume {consumer} --reason 'it was paused'"


class ConsumerPage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The durable consumers by stream and name; `pausing` are those of all meshes whose handler cannot be reached.

    `unread` is why the consumers themselves are missing.
    """

    pausing: list[Pause]
    consumers: list[Durable] = []
    unread: Problem | None = None


CONSUMERS: Final[Noun[ConsumersQuery, ConsumerPage, Any, Any, Any, ConsumerFilter, str]] = Noun(
    "consumer",
    "durable consumers, how far behind each is, and which pause",
    "/v1/consumers",
    ConsumersQuery,
    ConsumerPage,
    Change[ConsumerFilter],
    Result[str],
    {
        "pause": Verb(
            "Give consumers no more messages until they are resumed, whatever runs or starts; what they have in hand "
            "they finish.",
            "paused",
            frozenset({"active"}),
            grave=True,
            undoable=True,
        ),
        "resume": Verb("Give paused consumers messages again.", "resumed", frozenset({"paused"}), undoable=True),
        "delete": Verb(
            "Delete consumers that no program runs, and how far they were; the messages stay in their streams.",
            "deleted",
            frozenset({"active", "paused"}),
            grave=True,
        ),
    },
    reads="broker_look",
    changes="broker_repair",
)
