"""An agent of MeshForge, whose streams are in meshforge.toml; its durable is `scribe_consumer`.

POSTROOM_NATS_URL=nats://… postroom agent run meshforge_scribe:Scribe --tenant default --workspace demo
"""

from __future__ import annotations

from postroom.agent import Agent, Emit, Envelope


class Scribe(Agent):
    """Takes `cmd.default.demo.scribe.>`, and says on `evt.default.demo.scribe.written` what it wrote."""

    subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)
    event_subject = "evt.{tenant}.{workspace}.{agent}.{type}"

    async def receive(self, envelope: Envelope) -> Emit:
        """Write it down."""
        return Emit("written", {"text": envelope.payload["text"]})
