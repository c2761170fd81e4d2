"""What becomes of one message: refused, a conflict, or handled by the agent (docs/contract/delivery.md#delivery-56).

What an agent's effects become are messages whose ids, times and spans follow from the message that caused them. A
second run of the same message at the same agent derives the same ids, so that a second publish is the same message.
"""

import asyncio
import re
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec

from postroom.agent import Agent, Effect, Emit, Envelope, agent_name, effects_of, fill_event_subject
from postroom.chassis.handlers import contained
from postroom.delivery.agents.envelopes import digest, headers_of, later
from postroom.delivery.agents.store import Owner, Record, Role, with_payload
from postroom.delivery.nats import MOST_HEADER_BYTES
from postroom.delivery.subjects import command_subject, event_subject
from postroom.errors import InvalidMessage

CONFLICT: Final = "{agent}_conflict"
SECURITY: Final = "{agent}_security"
_HEADER: Final = re.compile(r"(?!\s)[^\x00-\x08\n-\x1f\x7f\ud800-\udfff]*(?<!\s)")  # receivers can read it


class Draft(NamedTuple):
    """An event that is about to be stored: it has no position yet."""

    role: Role
    subject: str
    envelope: Envelope
    payload: bytes  # canonical JSON

    def record(self, cause: int | None) -> Record:
        """Return what is stored of it."""
        return Record(cause=cause, envelope=self.envelope, role=self.role, subject=self.subject)


class Emitter:
    """Makes the messages of one agent."""

    def __init__(self, agent: type[Agent[Any]], owner: Owner, most_bytes: int) -> None:
        """`most_bytes` is the largest payload that JetStream takes."""
        self._agent = agent
        self._owner = owner
        self._most_bytes = most_bytes
        self._source = f"{owner.tenant}/{owner.workspace}/{owner.agent}"

    def emit(self, cause: Envelope, index: int, effect: Effect) -> Draft:
        """Make the message of one effect; raises `InvalidMessage` where a name or the payload is wrong."""
        tenant, workspace = self._owner.tenant, self._owner.workspace
        if isinstance(effect, Emit):
            subject = self._event_subject(effect.type, effect.version)
            return self._draft("emitted", subject, cause, index, effect, type=effect.type, version=effect.version)
        workspace = effect.workspace or workspace
        subject = command_subject(tenant, f"{workspace}.{effect.agent}.{effect.verb}")
        return self._draft("emitted", subject, cause, index, effect, type=effect.verb, workspace=workspace)

    def conflict(self, cause: Envelope, actual: int) -> Draft:
        """Report that a message expected another version of its entity; nothing was changed."""
        payload = {
            "actual_version": actual,
            "entity_id": cause.entity_id,
            "expected_version": cause.expected_version,
            "id": cause.id,
            "type": cause.type,
        }
        return self._report(CONFLICT, cause, Emit("conflict", payload, entity_id=cause.entity_id))

    def security(self, cause: Envelope) -> Draft:
        """Report that a message of another tenant or workspace was refused; its payload is not looked at."""
        payload = {
            "id": cause.id,
            "source": cause.source,
            "tenant": cause.tenant,
            "type": cause.type,
            "workspace": cause.workspace,
        }
        return self._report(SECURITY, cause, Emit("security", payload))

    def _report(self, name: str, cause: Envelope, effect: Emit) -> Draft:
        event = name.format(agent=self._owner.agent.replace("-", "_"))
        return self._draft("reported", self._event_subject(event, 1), cause, 0, effect, type=event)

    def _event_subject(self, name: str, version: int) -> str:
        """Return where an event goes; the rules for its name are the same everywhere."""
        event_subject(self._owner.tenant, name, version)
        return fill_event_subject(self._agent, self._owner.tenant, self._owner.workspace, name, version)

    def _draft(
        self,
        role: Role,
        subject: str,
        cause: Envelope,
        index: int,
        effect: Effect,
        *,
        type: str,  # noqa: A002 - the envelope's word
        version: int = 1,
        workspace: str | None = None,
    ) -> Draft:
        message_id = digest(*self._owner, cause.tenant, cause.workspace, cause.idempotency_key, index)[:32]
        envelope = Envelope(
            actor=self._owner.agent,
            causation_id=cause.id,
            correlation_id=cause.correlation_id,
            entity_id=effect.entity_id,
            expected_version=effect.expected_version,
            id=message_id,
            idempotency_key=message_id,
            sampled=cause.sampled,
            schema_version=version,
            source=self._source,
            span_id=digest("span", message_id)[:16],
            tenant=self._owner.tenant,
            trace_id=cause.trace_id,
            ts=later(cause.ts, index + 1),
            type=type,
            workspace=workspace or self._owner.workspace,
        )
        if effect.entity_id is not None and _HEADER.fullmatch(effect.entity_id) is None:
            detail = f"the entity_id of {envelope.type!r} is {effect.entity_id!r:.80}"
            rule = "it travels in a header, which has no control characters, and no white space at its ends"
            raise InvalidMessage.of("invalid_effect", f"{detail}: {rule}", field="entity_id")
        envelope, payload = with_payload(envelope, effect.payload)
        if len(payload) > self._most_bytes:  # it could be stored, but never published
            detail = f"the payload of {envelope.type!r} has {len(payload)} bytes, JetStream allows {self._most_bytes}"
            raise InvalidMessage.of("payload_too_large", detail, field="payload")
        headers = sum(len(name) + len(text.encode()) for name, text in headers_of(envelope).items())
        if headers > MOST_HEADER_BYTES:  # likewise
            detail = f"the headers of {envelope.type!r} have {headers} bytes, at most {MOST_HEADER_BYTES} are allowed"
            advice = "its entity_id, or the id or correlation id of the message that caused it, is too long"
            raise InvalidMessage.of("headers_too_large", f"{detail}: {advice}")
        return Draft(role, subject, envelope, payload)


def received_draft(role: Role, subject: str, envelope: Envelope, payload: Any) -> Draft:
    """Make the event of a message that came in."""
    envelope, encoded = with_payload(envelope, payload)
    return Draft(role, subject, envelope, encoded)


class Decision(NamedTuple):
    """What a message is to be stored as: the events, the first of which is the message, and what they change."""

    drafts: list[Draft]
    state: Any
    version: int | None = None  # the new version of the message's entity

    @property
    def role(self) -> Role:
        """What became of the message."""
        return self.drafts[0].role


class Decider:
    """Runs one agent, one message after another."""

    def __init__(self, agent: Agent[Any], emitter: Emitter, receive_seconds: float) -> None:
        self._agent = agent
        self._name = agent_name(type(agent))
        self._emitter = emitter
        self._receive_seconds = receive_seconds
        self._limit: asyncio.Timeout | None = None  # of the `receive` that runs

    @property
    def trouble(self) -> str | None:
        """Return why no message is handled: a `receive` that is over its time, and does not end."""
        if self._limit is None or not self._limit.expired():
            return None
        long = f"`receive` has taken longer than {self._receive_seconds:g} s"
        return f"{long}, and catches its cancellation: restart the agent"

    def refuse(self, subject: str, envelope: Envelope, state: Any) -> Decision:
        """Refuse a message of another tenant or workspace; its payload is not kept."""
        return Decision([received_draft("refused", subject, envelope, None), self._emitter.security(envelope)], state)

    async def decide(self, subject: str, envelope: Envelope, state: Any, version: int) -> Decision:
        """Handle a message whose entity has `version`; raises what the agent raises, and then changes nothing.

        What would end the process, such as `sys.exit`, becomes a `HandlerEnded`.
        """
        if envelope.expected_version is not None and envelope.expected_version != version:
            message = received_draft("conflict", subject, envelope, envelope.payload)
            return Decision([message, self._emitter.conflict(envelope, version)], state)
        message = received_draft("handled", subject, envelope, envelope.payload)
        return await contained(partial(self._handled, message, state, version))

    async def _handled(self, message: Draft, state: Any, version: int) -> Decision:
        self._agent.state = state
        # its own copy: what it changes there is not stored, and so nothing that `apply` may see
        given = msgspec.structs.replace(message.envelope, payload=msgspec.json.decode(message.payload))
        try:
            async with asyncio.timeout(self._receive_seconds) as limit:
                self._limit = limit
                returned = await self._agent.receive(given)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"receive took longer than {self._receive_seconds:g} s") from error
        finally:
            self._limit = None
        effects = enumerate(effects_of(returned, self._name))
        drafts = [message, *(self._emitter.emit(message.envelope, index, effect) for index, effect in effects)]
        for draft in drafts:
            state = self._agent.apply(state, draft.envelope)
        return Decision(drafts, state, None if message.envelope.entity_id is None else version + 1)
