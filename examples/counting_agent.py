"""An agent that answers each command with another message, and counts them.

    postroom up
    postroom agent run counting_agent:Counter --tenant demo       # in this folder, with the `env` file that `up` names
    postroom send queue:counter hello

Each command on `cmd.demo.default.counter.run` becomes one event `command_counted`, whatever crashes.
"""

from __future__ import annotations

from postroom.agent import Agent, Emit, Envelope


class Counter(Agent[int]):
    """Its state is the number of commands so far."""

    subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)

    def initial_state(self) -> int:
        """Begin at nought."""
        return 0

    async def receive(self, envelope: Envelope) -> Emit:
        """Answer with the command's number."""
        return Emit("command_counted", {"command": envelope.id, "number": self.state + 1})

    def apply(self, state: int, event: Envelope) -> int:
        """Count commands, and not the answers to them."""
        return state if event.type == "command_counted" else state + 1
