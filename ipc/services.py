"""What the handlers work with: the rooms that the daemon has built, each seen through the little that a route needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from ipc.budget import Budget
from ipc.counters import Counters
from ipc.destinations import DestinationRule
from ipc.limits import Limits
from ipc.peers import Policy
from outbox import Outbox
from postroom.sends import RelayStatus


class RelayControl(Protocol):
    """The relay, as far as the socket's routes steer it."""

    def status(self) -> RelayStatus:
        """Say what the relay does now."""
        ...

    async def controls_changed(self) -> None:
        """Let the relay read the controls, which have changed on disk, before its status is told."""
        ...


class TopicDesk(Protocol):
    """The broker's topics, as far as a member may see and join them."""

    async def topics(self) -> Any:
        """Return the topics of the member's mesh."""
        ...

    async def subscribe(self, topic: str) -> Any:
        """Subscribe the member to `topic`."""
        ...

    async def unsubscribe(self, topic: str) -> None:
        """End the member's subscription to `topic`."""
        ...


@dataclass(frozen=True, kw_only=True)
class Services:
    """Everything that a handler may use."""

    outbox: Outbox
    relay: RelayControl
    topics: TopicDesk
    mesh: str
    version: str
    expose: Callable[[], Awaitable[bytes]]  # the metrics in Prometheus' text format
    limits: Limits = field(default_factory=Limits)
    policy: Policy = field(default_factory=Policy)
    counters: Counters = field(default_factory=Counters)
    destinations: DestinationRule = field(default_factory=DestinationRule)
    outbox_max_bytes: int = 2**63 - 1  # size of the outbox file; `health` warns before

    @cached_property
    def budget(self) -> Budget:
        """The one budget of bytes that arrive, which all routes share."""
        return Budget(self.limits.buffered_bytes)
