"""What is under measurement beside the programs: an agent, and a flow, that do nothing."""

from __future__ import annotations

from typing import Any

from postroom.agent import Agent, Envelope
from postroom.flow import Context, Flow

flow = Flow("bench")


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


@flow.activity(sends="queue:bench")
async def ask(_ctx: Context, request: Any) -> Any:
    """Ask for whatever it was given."""
    return request


@ask.answered
async def _(_ctx: Context, _answer: Any) -> None:
    """Spawn nothing."""
