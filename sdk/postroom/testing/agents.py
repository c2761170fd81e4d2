"""`AgentCase`: an agent on its real store, without JetStream.

    async with AgentCase(Pricing) as case:
        received = await case.receive({"order": 17})
        assert received.outcome == "done"
        assert [(each.type, each.payload["total"]) for each in received.emitted] == [("order_priced", 42)]
        assert case.state.orders == 1

The runtime is the same as in production: what `receive` returns is committed with the message, a message is handled
once however often it is delivered, and one that fails is tried again. What it publishes stays in memory. At the end,
and at each `restart`, the state is built again from the store alone: it has to be the same, since `apply` must be pure.
"""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self
from uuid import UUID, uuid4

import msgspec

from postroom._wire.arguments import event_json
from postroom._wire.message import refuse
from postroom._wire.names import in_words
from postroom._wire.retry import Backoff
from postroom.agent import Agent, Envelope, agent_name, check_agent, fill_subjects
from postroom.claims import Dead, Done, Later, Outcome
from postroom.delivery.agents import database
from postroom.delivery.agents.envelopes import ENTITY_ID, EXPECTED_VERSION
from postroom.delivery.agents.outgoing import AgentCounters, Clock, StoreClaim, StoreSource
from postroom.delivery.agents.replay import replay
from postroom.delivery.agents.runtime import AgentRuntime
from postroom.delivery.agents.store import Owner, Store, decode_record, read_events
from postroom.delivery.agents.turns import Turns
from postroom.delivery.consumer import Attempts
from postroom.delivery.message import MESSAGE_ID, Delivery
from postroom.delivery.nats import USUAL_PAYLOAD
from postroom.delivery.publication import Outgoing, Place
from postroom.delivery.settings import AGENT_MAX_DELIVER, AgentSettings, RecordSettings
from postroom.delivery.streams import covers
from postroom.retry_policy import policy_of
from postroom.testing.fake import Sent
from postroom.testing.requests import published
from postroom.worker.config import AgentSection


class Received(NamedTuple):
    """What became of a message: `done`, to be tried `later`, or `dead`, why; and what was emitted for it."""

    outcome: Literal["done", "later", "dead"]
    error: str | None
    emitted: Sequence[Envelope]


class AgentCase:
    """One agent under test; a context manager.

    Its store is in `directory`, a temporary one where none is given. A message is tried `max_deliver` times; the
    default is that of an agent's config.
    """

    def __init__(
        self,
        agent: type[Agent[Any]],
        *,
        tenant: str = "demo",
        workspace: str = "default",
        directory: Path | None = None,
        max_deliver: int = AGENT_MAX_DELIVER,
        settings: AgentSettings | None = None,
    ) -> None:
        """Check the class, and what an agent's config checks; raises `InvalidAgent` or `InvalidMessage`."""
        check_agent(agent)
        configured = {"tenant": tenant, "workspace": workspace, "max_deliver": max_deliver}
        try:
            msgspec.convert(configured, AgentSection)
        except msgspec.ValidationError as error:
            refuse("invalid_field", in_words(str(error)))
        self._agent = agent
        self._tenant = tenant
        self._workspace = workspace
        self._directory = directory
        self._attempts = Attempts(max_deliver, Backoff(1.0, 1.0))
        self._settings = settings or AgentSettings()
        self._stack = AsyncExitStack()
        self._sequence = 0
        self._runtime: AgentRuntime | None = None
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="postroom-agent-")
            self._stack.callback(temporary.cleanup)
            self._directory = Path(temporary.name)
        await self._open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        async with self._stack:
            state = self._here.state
            await self._close()
            if kind is None:
                await self._check(state)

    @property
    def state(self) -> Any:
        """The agent's state after the last message."""
        return self._here.state

    @property
    def state_hash(self) -> str:
        """The hash of everything that the agent handled and emitted: 64 hex digits."""
        return self._here.state_hash

    async def receive(
        self,
        payload: Sent | Any = None,
        *,
        subject: str | None = None,
        message_id: UUID | str | None = None,
        entity_id: str | None = None,
        expected_version: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Received:
        """Deliver one message, and return what became of it.

        The message has the `payload` of an event or a command, or is what a program sent: `case.receive(post.sent[0])`.
        Without a `subject` a payload comes on the agent's first one, whose `>` reads as `run`. The same `message_id` is
        the same message, delivered again. `headers` are further ones of docs/delivery.md. Raises `InvalidMessage` for a
        subject that the agent does not have, `Fatal` where its store does.
        """
        message_id = str(message_id or uuid4())
        if isinstance(payload, Sent):
            own_subject, data, said = published(payload, self._tenant, "alice", message_id)
            subject = subject or own_subject
        else:
            data, said = event_json(payload), {MESSAGE_ID: message_id}
        given = {ENTITY_ID: entity_id, EXPECTED_VERSION: None if expected_version is None else str(expected_version)}
        said |= {name: value for name, value in given.items() if value is not None} | dict(headers or {})
        self._sequence += 1
        delivery = Delivery(
            self._subject(subject), data, said, said[MESSAGE_ID], "TEST", self._sequence, 1, datetime.now(UTC),
            policy_of(data),
        )  # fmt: skip
        outcomes: list[Outcome] = []

        async def settle(delivery: Delivery, outcome: Outcome) -> None:
            del delivery
            outcomes.append(outcome)

        before = self._here.position
        handling = asyncio.ensure_future(self._here.handle([delivery], settle))
        assert self._running is not None  # noqa: S101 - as long as there is a runtime
        await asyncio.wait({handling, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if not handling.done():
            handling.cancel()
            await self._running  # raises why it ended
        match outcomes:
            case [Done()]:
                return Received("done", None, await self._emitted(before, said[MESSAGE_ID]))
            case [Later(error, _)]:
                return Received("later", error, ())
            case [Dead(reason, error, _)]:
                return Received("dead", f"{reason}: {error}", await self._emitted(before, said[MESSAGE_ID]))
        raise AssertionError(f"a message was settled {len(outcomes)} times")

    async def restart(self) -> None:
        """Stop the agent and start it again; raises `AssertionError` where its state does not come back."""
        state = self._here.state
        await self._close()
        await self._check(state)
        await self._open()

    async def _open(self) -> None:
        assert self._directory is not None  # noqa: S101 - since it was entered
        self._runtime = await AgentRuntime.open(
            self._agent,
            _Memory,
            self._directory,
            tenant=self._tenant,
            workspace=self._workspace,
            settings=self._settings,
            attempts=self._attempts,
        )
        self._running = asyncio.create_task(self._runtime.run())

    async def _close(self) -> None:
        runtime, running = self._here, self._running
        self._runtime = self._running = None
        assert running is not None  # noqa: S101 - as above
        runtime.stop()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await runtime.close()

    async def _check(self, state: Any) -> None:
        """Build the state from the store alone; raises `AssertionError` where it is not the same."""
        assert self._directory is not None  # noqa: S101 - as above
        _, memory = await replay(self._agent, database(self._directory))
        if memory.state != state:
            raise AssertionError(
                f"{self._agent.__name__}.apply is not pure: its state was {state!r}, and the same events give "
                f"{memory.state!r}; it must build a new state from its two arguments alone, and a state must compare "
                "by its value (a NamedTuple, a dataclass, a dict)"
            )

    async def _emitted(self, after: int, message_id: str) -> list[Envelope]:
        """Read what was emitted for a message after a position of the store."""
        memory = self._here.publisher
        assert isinstance(memory, _Memory)  # noqa: S101 - `_open` made it
        return [each for each in await memory.emitted(after) if each.causation_id == message_id]

    @property
    def _here(self) -> AgentRuntime:
        if self._runtime is None:
            raise RuntimeError(f"use it as a context manager: async with AgentCase({self._agent.__name__}) as case")
        return self._runtime

    def _subject(self, subject: str | None) -> str:
        wanted = fill_subjects(self._agent, self._tenant, self._workspace)
        found = subject or wanted[0].replace(">", "run")
        if "*" in found or not any(covers(pattern, found) for pattern in wanted):
            sentence = f"{agent_name(self._agent)} handles {', '.join(wanted)}: give a subject that is one of these"
            refuse("invalid_subject", sentence, "subject")
        return found


class _Memory:
    """JetStream in memory: what it is given is published at once, and marked so in the store."""

    most_bytes = USUAL_PAYLOAD
    trouble: str | None = None

    def __init__(self, store: Store, turns: Turns, _owner: Owner, counters: AgentCounters, clock: Clock) -> None:
        self._source = StoreSource(store, turns, RecordSettings(), counters, clock)
        self._store = store
        self._turns = turns
        self._created_at = datetime.now(UTC)  # of the stream, which ends with its agent
        self._sequence = 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def rounds(self, messages: Sequence[Outgoing]) -> AsyncIterator[set[int]]:
        placed = []
        for message in messages:
            self._sequence += 1
            placed.append((message, Place("TEST", self._created_at, self._sequence, duplicate=False)))
        await StoreClaim(self._source, messages).settle(placed, (), ())
        yield set()

    async def close(self) -> None:
        pass

    async def emitted(self, after: int) -> list[Envelope]:
        async with self._turns.turn():
            events = await self._store.run(lambda db: list(read_events(db, after)))
        records = [decode_record(event.record) for event in events]
        return [record.envelope for record in records if record.role in ("emitted", "reported")]
