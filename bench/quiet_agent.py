"""The agent under measurement: its `receive` does nothing, its state counts."""

from __future__ import annotations

from postroom.agent import Agent, Envelope


class Quiet(Agent[int]):
    """Takes every event of the benchmark and says nothing."""

    subjects = ("{tenant}.event.placed.v1",)

    def initial_state(self) -> int:
        """Begin at nought."""
        return 0

    async def receive(self, envelope: Envelope) -> None:
        """Do nothing."""

    def apply(self, state: int, event: Envelope) -> int:  # noqa: ARG002 - it only counts
        """Count."""
        return state + 1
