"""What the handlers work with: the daemon's rooms, each as the interface that the routes need."""

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

from inbox import Inbox, InboxSettings
from ipc.peers import Accept, DestinationRule, Policy
from ipc.shares import Budget, Limits
from outbox import Outbox
from postroom._wire.sends import RelayStatus
from postroom.chassis.routes import Histogram
from postroom.errors import NotFound

_ACCEPT_BOUNDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)  # seconds


class RelayControl(Protocol):
    """The relay, as the routes control it."""

    def status(self) -> RelayStatus:
        """Return what the relay does now."""

    async def controls_changed(self) -> None:
        """Read the controls, which have changed on disk, before the next `status`."""


class BrokerTopics(Protocol):
    """The broker's topics, as a member may see and join them."""

    async def topics(self) -> Any:
        """Return the topics of the member's mesh."""

    async def subscribe(self, topic: str) -> Any:
        """Subscribe the member to `topic`."""

    async def unsubscribe(self, topic: str) -> None:
        """End the member's subscription to `topic`."""


class InboxSource(Protocol):
    """The inbox, if there is one."""

    def opened(self) -> Inbox:
        """Return it; raises `PostroomError` where it is not open."""

    def trouble(self) -> str | None:
        """Return what keeps messages from arriving, None where nothing does."""


class NoInbox:
    """The inbox of a daemon without one."""

    def opened(self) -> Inbox:
        """Raise `NotFound`."""
        detail = "this daemon has no inbox: set nats.url in its config, since messages reach one through NATS"
        raise NotFound.of("inbox_not_configured", detail)

    def trouble(self) -> None:
        """Return None: nothing is wrong with that."""


class Counters:
    """The socket's counts since the process began: plain integers, incremented in the hot path, read by the metrics."""

    def __init__(self) -> None:
        self.sends: Counter[str] = Counter()  # by outcome: queued, inflight, done, or the problem's code
        self.accept = Histogram(_ACCEPT_BOUNDS)  # of POST /v1/send, from the parsed head to the answer
        self.batches = 0
        self.answers: Counter[int] = Counter()  # every request but sends, by status
        self.dropped: Counter[str] = Counter()  # connections ended by a deadline or a cap, by reason
        self.connections = 0  # open now
        self.in_flight = 0  # requests being answered now, those of the live stream apart
        self.event_readers = 0  # of the live stream, now


@dataclass(frozen=True, kw_only=True)
class Services:
    """Everything that a handler may use."""

    outbox: Outbox
    relay: RelayControl
    topics: BrokerTopics
    inbox: InboxSource = field(default_factory=NoInbox)
    inbox_settings: InboxSettings = field(default_factory=InboxSettings)
    mesh: str
    version: str
    expose: Callable[[], Awaitable[bytes]]  # the metrics in Prometheus' text format
    limits: Limits = field(default_factory=Limits)
    policy: Policy = field(default_factory=Policy)
    counters: Counters = field(default_factory=Counters)
    destinations: DestinationRule = field(default_factory=DestinationRule)
    late_seconds: float = 300  # that a due message may have waited before `health` says so
    lost_sockets: Callable[[], list[Path]] = list  # those of the daemon whose file is no longer there

    @cached_property
    def accept(self) -> Accept:
        """The function that accepts the sends that the config allows."""
        return self.destinations.accepting(self.outbox)

    @cached_property
    def budget(self) -> Budget:
        """The budget of bytes in memory, which all routes share."""
        return Budget(self.limits.buffered_bytes)

    @cached_property
    def waits(self) -> Budget:
        """The look-ups that wait for a send to settle."""
        return Budget(self.limits.waits, "too many wait for a send to settle: ask again without wait")

    @cached_property
    def readers(self) -> Budget:
        """The readers of the live stream."""
        full = "too many read the live stream (inbox.readers): try again"
        return Budget(self.inbox_settings.readers, full, "too_many_readers")
