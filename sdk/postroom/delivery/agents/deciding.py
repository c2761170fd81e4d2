"""What becomes of one message: refused, a conflict, or handled by the agent (docs/contract/delivery.md#delivery-56)."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple

from postroom.agent import Agent, Effects, Envelope, agent_name, effects_of
from postroom.delivery.agents.emitting import Draft, Emitter, received_draft
from postroom.delivery.agents.records import Role
from postroom.delivery.agents.store import Tried


class Decision(NamedTuple):
    """What a message is to be stored as: the events, the first of which is the message, and what they change."""

    drafts: list[Draft]
    state: Any
    version: int | None = None  # the new version of the message's entity

    @property
    def role(self) -> Role:
        """What became of the message."""
        return self.drafts[0].role


class Deciding:
    """Runs one agent, one message after another."""

    def __init__(self, agent: Agent[Any], emitter: Emitter, receive_seconds: float) -> None:
        self._agent = agent
        self._name = agent_name(type(agent))
        self._emitter = emitter
        self._receive_seconds = receive_seconds

    def refuse(self, subject: str, envelope: Envelope, state: Any) -> Decision:
        """Refuse a message of another tenant or workspace; its payload is not kept."""
        return Decision([received_draft("refused", subject, envelope, None), self._emitter.security(envelope)], state)

    def told(self, tried: Tried) -> None:
        """Let the agent see which attempt comes next, and why the one before failed."""
        self._agent.attempt = tried.attempts + 1
        self._agent.last_error = tried.last_error or None

    async def decide(self, subject: str, envelope: Envelope, state: Any, version: int) -> Decision:
        """Handle a message whose entity has `version`; raises whatever the agent raises, and changes nothing then."""
        if envelope.expected_version is not None and envelope.expected_version != version:
            message = received_draft("conflict", subject, envelope, envelope.payload)
            return Decision([message, self._emitter.conflict(envelope, version)], state)
        message = received_draft("handled", subject, envelope, envelope.payload)
        self._agent.state = state
        returned = await self._receive(message.envelope)
        effects = enumerate(effects_of(returned, self._name))
        drafts = [message, *(self._emitter.emit(message.envelope, index, effect) for index, effect in effects)]
        for draft in drafts:
            state = self._agent.apply(state, draft.envelope)
        return Decision(drafts, state, None if envelope.entity_id is None else version + 1)

    async def _receive(self, envelope: Envelope) -> Effects:
        try:
            async with asyncio.timeout(self._receive_seconds) as limit:
                return await self._agent.receive(envelope)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"receive took longer than {self._receive_seconds:g} s") from error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise  # the agent is being stopped
            raise RuntimeError("receive was cancelled by something that it awaited") from error
