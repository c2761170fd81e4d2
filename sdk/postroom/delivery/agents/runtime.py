"""The agent runtime: a handler of the consumer core (docs/contract/delivery.md#delivery-56).

1. Receive: messages are queued in the order they were published, not in the order of pulls. 2. Look up their keys in
the store. 3. Handle those that it does not hold, one after another, and commit each with what it emitted, many to a
transaction. 4. Publish what is stored and not marked published. 5. Mark it. 6. Settle.

What may run twice, and what makes the second run harmless: a message that is delivered again is found by its key
(`event_input` in schema.sql) and never handled again, only finished; a message that is published again has the same
id. `receive` itself runs again only where nothing of its first run was committed.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, Self, TypeAlias

import msgspec
import structlog
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom._wire.ids import now_ms
from postroom._wire.retry import error_text
from postroom.agent import EPOCH, Agent, agent_name, check_agent, fill_event_subject
from postroom.chassis.exits import Exit, Fatal
from postroom.claims import DONE, Dead, Outcome
from postroom.delivery.agents import database
from postroom.delivery.agents.decisions import Decider, Decision, Emitter
from postroom.delivery.agents.envelopes import (
    ENTITY_ID,
    Scope,
    idempotency_key,
    later,
    received,
    refused,
    scope_of,
    to_microseconds,
)
from postroom.delivery.agents.outgoing import AgentCounters, AgentPublisher, Clock, emitted, stored
from postroom.delivery.agents.replay import Differs, Memory, begin, rebuild
from postroom.delivery.agents.store import (
    Attempt,
    Changes,
    Event,
    Key,
    Owner,
    Role,
    Store,
    Tried,
    TurnInput,
    durably,
    encode_record,
    next_hash,
    read_events,
)
from postroom.delivery.agents.turns import Begun, Turns
from postroom.delivery.consumer import ACK_TIMEOUT, MAX_DELIVER, Attempts, Consumer, Settle, processing
from postroom.delivery.errors import from_nats, mapped
from postroom.delivery.message import Delivery
from postroom.delivery.publication import Outgoing
from postroom.delivery.settings import AgentSettings, ConsumerSettings
from postroom.delivery.streams import all_streams, covers, refuse_left_behind
from postroom.errors import NotFound

_log = structlog.get_logger(__name__)

_FINISHING: Final = 8  # groups that may be published and settled at once
_ERROR_CHARACTERS: Final = 500
_TYPE: Final = "any-type"  # a placeholder for all of them in a subject; no event has that name
_VERSION: Final = "any-version"
_UNTRIED: Final = Tried(0, "")
_REFUSED: Final = Dead("refused", "the message is of another tenant or workspace than the agent")


class Outlet(Protocol):
    """Where the messages of an agent go: into JetStream (`AgentPublisher`)."""

    most_bytes: int  # of a payload

    @property
    def trouble(self) -> str | None:
        """Return why nothing can be published now."""

    async def run(self) -> None:
        """Publish again what was lost, until cancelled."""

    def rounds(self, messages: Sequence[Outgoing]) -> AsyncIterator[set[int]]:
        """Publish until everything is there; after each round yield the causes of what is not."""

    async def close(self) -> None:
        """Publish nothing more."""


Publishing: TypeAlias = Callable[[Store, Turns, Owner, AgentCounters, Clock], Outlet]


class AgentRuntime:
    """Runs one agent over its store; `run` it as a task next to its consumers.

    It counts attempts that began, in the store; the server's count of deliveries does not matter.
    """

    def __init__(
        self,
        agent: Agent[Any],
        memory: Memory,
        store: Store,
        turns: Turns,
        *,
        publishing: Publishing,
        settings: AgentSettings,
        attempts: Attempts,
        clock: Clock,
    ) -> None:
        self.counters = AgentCounters()
        self._agent = agent
        self._owner = Owner(agent_name(type(agent)), agent.tenant, agent.workspace)
        self._own = Scope(agent.tenant, agent.workspace)
        self._store = store
        self._turns = turns
        self._settings = settings
        self._attempts = attempts
        self._clock = clock
        self.publisher = publishing(store, turns, self._owner, self.counters, clock)
        self._memory = memory
        emitter = Emitter(type(agent), self._owner, self.publisher.most_bytes)
        self._decider = Decider(agent, emitter, settings.receive_seconds)
        self._jobs: list[Job] = []
        self._in_hand: set[Job] = set()
        self._fitting = settings.group_messages  # how many a turn takes: about what it can handle in its time
        self._wake = asyncio.Event()
        self._room = asyncio.Semaphore(_FINISHING)
        self._stopping = self._ended = False

    @classmethod
    async def open(
        cls,
        agent_class: type[Agent[Any]],
        publishing: Publishing,
        directory: Path,
        *,
        tenant: str,
        workspace: str,
        settings: AgentSettings,
        attempts: Attempts,
        clock: Clock = now_ms,
    ) -> Self:
        """Open the agent's store in `directory` and build its state.

        `publishing` makes what publishes from it (`into_jetstream`); `attempts` is how often a message is attempted,
        unless its sender allows fewer. Raises `InvalidAgent`, or `Fatal` (78) where the agent cannot be created, or
        its store cannot be used or was altered.
        """
        check_agent(agent_class)
        owner = Owner(agent_name(agent_class), tenant, workspace)
        agent, memory = begin(agent_class, owner)
        async with AsyncExitStack() as undo:
            turns = Turns(directory)
            undo.callback(turns.close)
            async with turns.turn():
                store = await Store.open(database(directory), owner, was_opened=turns.was_opened)
                undo.push_async_callback(store.close)
                if not turns.was_opened:
                    turns.end()
                try:
                    memory = await store.run(lambda db: rebuild(agent, memory, read_events(db)))
                except Differs as difference:
                    raise _altered(difference) from difference
            runtime = cls(
                agent, memory, store, turns, publishing=publishing, settings=settings, attempts=attempts, clock=clock
            )
            undo.pop_all()
        return runtime

    def stop(self) -> None:
        """Count no attempt that is cancelled from here on: it ends with the process, not the process with it."""
        self._stopping = True

    async def close(self) -> None:
        """Close the store; call it once `run` has ended."""
        await self.publisher.close()
        async with self._turns.turn():
            await self._store.close()
        self._turns.close()

    @property
    def tenant(self) -> str:
        """Where the agent runs."""
        return self._owner.tenant

    @property
    def trouble(self) -> str | None:
        """Return what keeps it from handling messages now."""
        return self._store.trouble or self._turns.trouble or self._decider.trouble or self.publisher.trouble

    @property
    def position(self) -> int:
        """The last position of the store that this process knows."""
        return self._memory.position

    @property
    def state_hash(self) -> str:
        """The state hash there, 64 hex digits."""
        return self._memory.state_hash.hex()

    @property
    def state(self) -> Any:
        """The agent's state there."""
        return self._memory.state

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        """Handle a batch of the consumer core; returns when each of its messages is settled, or `run` has ended."""
        if self._ended:
            return
        loop = asyncio.get_running_loop()
        jobs = [Job(delivery, settle, loop.create_future()) for delivery in batch]
        for job in jobs:
            heapq.heappush(self._jobs, job)
        self._in_hand.update(jobs)
        self._wake.set()
        try:
            await asyncio.gather(*(job.done for job in jobs))
        finally:
            self._in_hand.difference_update(jobs)

    async def run(self) -> None:
        """Handle what comes in, until cancelled; first publish what an earlier process left unpublished.

        Raises `Fatal`: 74 where the disk failed during a commit, 78 where another process wrote what cannot be applied.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._recover())
                tasks.create_task(self.publisher.run())
                while True:
                    await self._wake.wait()
                    await self._room.acquire()
                    tasks.create_task(self._finish(await self._take_turn()))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._ended = True
            for job in self._in_hand:  # the core gives them back, instead of waiting for them at its stop
                job.give_up()

    async def _recover(self) -> None:
        async with self._turns.turn():
            left = [stored(row) for row in await self._store.unpublished()]
        async for _ in self.publisher.rounds(left):
            pass

    async def _take_turn(self) -> Group:
        async with self._turns.turn():
            await self._count_death()
            jobs: list[Job] = []
            while self._jobs and len(jobs) < self._fitting:
                job = heapq.heappop(self._jobs)
                if not job.done.done():  # else the core gave it up
                    jobs.append(job)
            if not self._jobs:
                self._wake.clear()
            keys: list[Key] = []
            for job in jobs:
                scope = scope_of(job.delivery, self._own)
                keys.append((idempotency_key(job.delivery), scope.workspace or "", scope.tenant or ""))
            entities = [entity for job in jobs if (entity := job.delivery.headers.get(ENTITY_ID))]
            message_ids = [message_id for job in jobs if (message_id := job.delivery.message_id)]
            given = await self._store.read_turn(keys, entities, message_ids, self._memory.position)
            try:  # to apply what another process of this agent has stored since
                self._memory = rebuild(self._agent, self._memory, given.news)
            except Differs as difference:
                raise _altered(difference) from difference
            group = Group(self._memory, given.versions, given.tried)
            try:
                await self._handle_jobs(group, jobs, keys, given)
            except asyncio.CancelledError:
                if self._stopping:  # else a task that `receive` left behind may have ended the loop
                    self._turns.end()
                raise
            self._turns.end()
            if not group.changes.none:
                await durably(partial(self._store.append, group.changes))
                self._memory = group.memory
                roles = [role for _, role in group.keys.values()]
                self.counters.handled += roles.count("handled")
                self.counters.conflicts += roles.count("conflict")
                self.counters.refused += roles.count("refused")
                self.counters.emitted += len(group.outgoing)
            known = [position for _, position, _ in group.stored if position <= given.head.position]
            if known:
                group.outgoing += [stored(row) for row in await self._store.unpublished_of(known)]
        return group

    async def _count_death(self) -> None:
        """Count the attempt that a process of this agent ended during, if any."""
        if (begun := self._turns.left_behind()) is not None:
            _log.warning("agent_died", message_id=begun.message_id, attempt=begun.number)
            attempt = Attempt(*begun, ACK_TIMEOUT, self._clock())
            await durably(partial(self._store.append, Changes([], {}, 0, [attempt], [])))
            self._turns.end()

    async def _handle_jobs(self, group: Group, jobs: Sequence[Job], keys: Sequence[Key], given: TurnInput) -> None:
        now = asyncio.get_running_loop().time
        due = now() + self._settings.group_seconds
        for index, job in enumerate(jobs):
            late = now() > due
            # a message that a process ended during begins a group, so that it takes nothing uncommitted with it
            if index and (late or group.tried(job.delivery.message_id).last_error == ACK_TIMEOUT):
                if late:
                    self._fitting = index
                for left in jobs[index:]:
                    heapq.heappush(self._jobs, left)
                self._wake.set()
                return
            known = given.found.get(index) or group.keys.get(keys[index])
            if known is None:
                await self._handle_one(group, job, keys[index])
            else:
                self.counters.found += 1
                group.know(job, *known)
        self._fitting = min(2 * self._fitting, self._settings.group_messages)

    async def _handle_one(self, group: Group, job: Job, key: Key) -> None:
        delivery = job.delivery
        if delivery.message_id is None:
            group.settled.append(
                (job, Dead("no_message_id", "the message has no Nats-Msg-Id and no broker_message_id"))
            )
            return
        tried = group.tried(delivery.message_id)
        if tried.attempts >= delivery.most_attempts(self._attempts.most):
            group.settled.append((job, Dead(MAX_DELIVER, tried.last_error, tried.attempts)))
            return
        begun = Begun(delivery.message_id, tried.attempts + 1)
        self._agent.attempt, self._agent.last_error = begun.number, tried.last_error or None
        self._turns.begin(begun)
        try:
            scope, state = scope_of(delivery, self._own), group.memory.state
            if scope == self._own:
                envelope = received(delivery, scope, group.tick)
                version = group.version(envelope.entity_id)
                with processing(delivery, self._owner.agent, begun.number):
                    decision = await self._decider.decide(delivery.subject, envelope, state, version)
            else:
                _log.warning("message_refused", message_id=delivery.message_id, tenant=scope[0], workspace=scope[1])
                decision = self._decider.refuse(delivery.subject, refused(delivery, scope, group.tick), state)
        except Exception as error:  # noqa: BLE001 - whatever the author's code raised, the others go on
            _log.warning("agent_failed", message_id=begun.message_id, attempt=begun.number, exc_info=error)
            self.counters.failed += 1
            said = error_text(error)[:_ERROR_CHARACTERS]
            group.fail(job, Attempt(*begun, said, self._clock()), self._attempts)
        else:
            group.add(job, key, decision)

    async def _finish(self, group: Group) -> None:
        """Publish what the group caused, mark it, and settle its messages, each as soon as possible."""
        waiting, first = group.stored, True
        async for missing in self.publisher.rounds(group.outgoing):
            ready = [stored for stored in waiting if stored[1] not in missing]
            waiting = [stored for stored in waiting if stored[1] in missing]
            for job, outcome in [*group.settled, *((job, outcome) for job, _, outcome in ready)]:
                await job.finish(outcome)
            group.settled.clear()
            if first:
                self._room.release()  # what JetStream does not accept now holds up no other group
                first = False


async def open_consumers(
    js: JetStreamContext, runtime: AgentRuntime, subjects: Sequence[str], settings: ConsumerSettings
) -> list[Consumer]:
    """Declare the durable consumers for `subjects`, one for each stream that keeps some of them, and return them.

    The stream in `settings` is replaced. Raises `NotFound` where no stream keeps a subject, `Conflict` where a durable
    of that name does something else, also in a stream of the tenant that keeps none, `Unavailable` without JetStream.
    """
    wanted = defaultdict(list)
    for subject in subjects:
        try:
            wanted[await js.find_stream_name_by_subject(subject)].append(subject)
        except NotFoundError as error:
            detail = f"no stream has {subject}: declare one (`postroom worker run` declares those of a mesh)"
            raise NotFound.of("stream_not_found", detail, retryable=True) from error
        except Exception as error:
            raise from_nats(error, f"looking for the stream of {subject}") from error
    of_the_tenant = (f"{runtime.tenant}.>", f"cmd.{runtime.tenant}.>")
    with mapped(f"looking for the consumers {settings.durable}"):
        await refuse_left_behind(js, settings.durable, of_the_tenant, wanted)
    consumers: list[Consumer] = []
    assert isinstance(runtime.publisher, AgentPublisher)  # noqa: S101 - with JetStream, the publisher is always this one
    for stream, some in wanted.items():
        own = msgspec.structs.replace(settings, stream=stream, filter_subjects=some)
        consumers.append(Consumer(js, own, runtime, runtime.publisher))
        await consumers[-1].declare()
    return consumers


async def check_events(js: JetStreamContext, agent: type[Agent[Any]], tenant: str, workspace: str) -> None:
    """Raise `NotFound` unless a stream accepts all events of the agent: they would wait in its store for ever."""
    words = fill_event_subject(agent, tenant, workspace, _TYPE, _VERSION).split(".")
    subjects = ".".join("*" if _TYPE in word or _VERSION in word else word for word in words)
    with mapped(f"looking for the stream of {subjects}"):
        streams, missing = await all_streams(js)
    taken = any(covers(pattern, subjects) for info in streams for pattern in info.config.subjects or ())
    if not taken and not missing:  # else a cluster elects a leader: a missing stream may accept them
        detail = (
            f"no stream has {subjects}, where the events of {agent.__name__} are published: declare one, or set its "
        )
        raise NotFound.of("stream_not_found", f"{detail}event_subject to a subject of a stream", retryable=True)


def _altered(difference: Differs) -> Fatal:
    return Fatal(
        Exit.CONFIG,
        f"the event store was altered at {difference}: the agent does not run on it; see `postroom agent verify`",
    )


class Job:
    """A delivery that waits to be handled and settled."""

    __slots__ = ("_settle", "delivery", "done", "order")

    def __init__(self, delivery: Delivery, settle: Settle, done: asyncio.Future[None]) -> None:
        self.delivery = delivery
        self.done = done
        # messages are handled in the order they were published, however they were pulled
        self.order = delivery.published_at, delivery.stream, delivery.sequence
        self._settle = settle

    def __lt__(self, other: Job) -> bool:
        return self.order < other.order

    async def finish(self, outcome: Outcome) -> None:
        """Settle the delivery."""
        await self._settle(self.delivery, outcome)
        self.give_up()

    def give_up(self) -> None:
        """Have nobody wait for it any more."""
        if not self.done.done():
            self.done.set_result(None)


class Group:
    """One transaction before its commit; `memory` is the agent's after it."""

    def __init__(self, memory: Memory, versions: Mapping[str, int], tried: Mapping[str, Tried]) -> None:
        self.memory = memory
        self.events: list[Event] = []
        self.outgoing: list[Outgoing] = []
        self.keys: dict[Key, tuple[int, Role]] = {}  # of its messages: their positions, and what became of them
        self.settled: list[tuple[Job, Outcome]] = []  # messages that need nothing published
        self.stored: list[tuple[Job, int, Outcome]] = []  # with the position of its event
        self._versions = versions
        self._changed: dict[str, int] = {}  # versions of entities
        self._tried = dict(tried)
        self._failed: list[Attempt] = []
        self._handled: list[str] = []  # messages that failed before

    @property
    def changes(self) -> Changes:
        """What the transaction has to write."""
        return Changes(self.events, self._changed, self.memory.logical_clock, self._failed, self._handled)

    def tick(self) -> datetime:
        """Return the logical clock's next time, at most the latest one."""
        return later(EPOCH, self.memory.logical_clock + 1)

    def version(self, entity_id: str | None) -> int:
        """Return how often an entity was changed."""
        return 0 if entity_id is None else self._changed.get(entity_id, self._versions.get(entity_id, 0))

    def tried(self, message_id: str | None) -> Tried:
        """Return the outcome of earlier attempts at a message."""
        return _UNTRIED if message_id is None else self._tried.get(message_id, _UNTRIED)

    def add(self, job: Job, key: Key, decision: Decision) -> None:
        """Append what was decided about a message."""
        cause = self.memory.position + 1
        self.keys[key] = cause, decision.role
        entity_id = decision.drafts[0].envelope.entity_id
        if decision.version is not None and entity_id is not None:
            self._changed[entity_id] = decision.version
        for draft in decision.drafts:
            position, state_hash, clock, _ = self.memory
            record = encode_record(draft.record(cause if position >= cause else None), draft.payload)
            event = Event(position + 1, record, next_hash(state_hash, record))
            self.events.append(event)
            if position >= cause:
                self.outgoing.append(emitted(event.position, cause, draft))
            clock = max(clock, to_microseconds(draft.envelope.ts))
            self.memory = Memory(event.position, event.state_hash, clock, decision.state)
        self.know(job, cause, decision.role)

    def fail(self, job: Job, attempt: Attempt, attempts: Attempts) -> None:
        """Note an attempt that failed, and what follows."""
        self._failed.append(attempt)
        self._tried[attempt.message_id] = Tried(attempt.number, attempt.error)
        self.settled.append((job, attempts.failed(job.delivery, attempt.number, attempt.error)))

    def know(self, job: Job, position: int, role: Role) -> None:
        """Note a message that the store holds: it only has to be finished, and its failed attempts are over."""
        self.stored.append((job, position, _REFUSED if role == "refused" else DONE))
        if job.delivery.message_id in self._tried:
            self._handled.append(job.delivery.message_id)
