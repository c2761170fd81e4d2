"""What an agent has done since it started."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class AgentCounters:
    """For metrics; each counts messages."""

    handled: int = 0
    found: int = 0  # delivered again after they were stored
    conflicts: int = 0
    refused: int = 0
    failed: int = 0  # `receive` or `apply` raised, or the message could not be read
    emitted: int = 0
    published: int = 0
    lost: int = 0  # by JetStream: they are published again
