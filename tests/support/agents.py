"""Agents that count, run on a real JetStream and a real store; and what became of them."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec
from nats.js.api import ConsumerInfo
from nats.js.errors import NotFoundError

from postroom.agent import Agent, Emit, Envelope, agent_name, fill_subjects
from postroom.delivery.agents.outgoing import into_jetstream
from postroom.delivery.agents.runtime import AgentRuntime, open_consumers
from postroom.delivery.consumer import Attempts, Consumer
from postroom.delivery.settings import AgentSettings, ConsumerSettings
from support.jetstream import QUICK, Context, named
from support.waiting import until_so

STOP_SECONDS = 3
SETTINGS = AgentSettings(retry_seconds=0.05, publish_seconds=1)
ATTEMPTS = Attempts(5, QUICK.schedule)


class Tally(NamedTuple):
    """The state of an agent that counts."""

    orders: int = 0
    total: int = 0


class Counting(Agent[Tally]):
    """Counts orders, and announces each twice; refuses the poisonous ones."""

    name = "counting"
    subjects = ("{tenant}.event.order_placed.v1",)
    runs: ClassVar[Counter[str]] = Counter()  # by message id, over all instances of a process

    def initial_state(self) -> Tally:
        return Tally()

    async def receive(self, envelope: Envelope) -> list[Emit]:
        self.runs[envelope.id] += 1
        if envelope.payload.get("poison"):
            raise ValueError("the order is poisonous")
        return [Emit("order_counted", {"order": envelope.id, "part": part}) for part in (1, 2)]

    def apply(self, state: Tally, event: Envelope) -> Tally:
        if event.type != "order_placed":
            return state
        return Tally(state.orders + 1, state.total + event.payload["total"])


class Running(NamedTuple):
    """A running agent."""

    runtime: AgentRuntime
    consumers: list[Consumer]


async def opened(
    context: Context,
    directory: Path,
    agent: type[Agent[Any]] = Counting,
    *,
    workspace: str = "default",
    settings: AgentSettings = SETTINGS,
    attempts: Attempts = ATTEMPTS,
) -> AgentRuntime:
    """Open an agent with a store of its own, for the test to give it messages."""
    return await AgentRuntime.open(
        agent,
        into_jetstream(context.js, context.nats, settings),
        directory,
        tenant=context.name,
        workspace=workspace,
        settings=settings,
        attempts=attempts,
    )


@asynccontextmanager
async def running_agent(
    context: Context,
    directory: Path,
    agent: type[Agent[Any]] = Counting,
    *,
    workspace: str = "default",
    settings: AgentSettings = SETTINGS,
    **consumer: Any,
) -> AsyncIterator[Running]:
    """Run an agent for the length of the block; what ends it early fails the test."""
    wanted = msgspec.convert(
        {
            "stream": "unknown",
            "durable": f"{agent_name(agent)}_consumer",
            "max_deliver": 5,
            "backoff": msgspec.to_builtins(QUICK),
            "batch": 50,
            **consumer,
        },
        ConsumerSettings,
    )
    attempts = Attempts(wanted.max_deliver, wanted.backoff.schedule)
    runtime = await opened(context, directory, agent, workspace=workspace, settings=settings, attempts=attempts)
    subjects = fill_subjects(agent, context.name, workspace)
    consumers = await open_consumers(context.js, runtime, subjects, wanted)
    tasks = [asyncio.create_task(runtime.run()), *(asyncio.create_task(consumer.run()) for consumer in consumers)]
    try:
        yield Running(runtime, consumers)
    finally:
        runtime.stop()
        with suppress(TimeoutError):  # what cannot be published stays in hand
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*(each.stop() for each in consumers))
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await runtime.close()
    for outcome in ended:
        if isinstance(outcome, Exception):
            raise outcome


async def settled(context: Context, durable: str = "counting_consumer", stream: str | None = None) -> None:
    """Return when a durable was given the last message that it wants, and the server waits for no ack."""
    stream = stream or context.events

    async def idle() -> bool:
        try:
            info = await context.js.consumer_info(stream, durable)
        except NotFoundError:  # not made yet
            return False
        last = await last_wanted(context, stream, info)
        if info.delivered is None or info.delivered.stream_seq < last:  # the count of a new one lags behind
            return False
        return info.num_ack_pending == 0 and info.num_pending == 0

    await until_so(idle, "everything is settled")


async def last_wanted(context: Context, stream: str, info: ConsumerInfo) -> int:
    """Return the last sequence of a stream that a consumer wants; 0 where the stream keeps none of it any more."""
    wanted = info.config.filter_subjects or [info.config.filter_subject or ">"]
    try:
        return max([(await context.js.get_last_msg(stream, subject)).seq or 0 for subject in wanted])
    except NotFoundError:
        return 0


async def place_orders(context: Context, ids: Iterable[str], **headers: str) -> None:
    """Publish an order of 2 under each id."""
    for message_id in ids:
        await context.js.publish(context.subject, b'{"total":2}', headers={**named(message_id), **headers})


class Kept(NamedTuple):
    """One event of a store."""

    position: int
    role: str
    envelope: Envelope
    published: bool


def kept(directory: Path) -> list[Kept]:
    """Read a store, in order."""
    query = (
        "SELECT position, role, record ->> '$.envelope', outgoing.published_at IS NOT NULL "
        "FROM event LEFT JOIN outgoing USING (position) ORDER BY position"
    )
    with closing(sqlite3.connect(directory / "events.db")) as db:
        return [
            Kept(position, role, msgspec.json.decode(envelope, type=Envelope), bool(published))
            for position, role, envelope, published in db.execute(query)
        ]


def attempted(directory: Path) -> dict[str, tuple[int, str]]:
    """Read which messages a store remembers failed attempts of: how many, and the last error."""
    with closing(sqlite3.connect(directory / "events.db")) as db:
        found = db.execute("SELECT message_id, attempts, last_error FROM attempt").fetchall()
    return {message_id: (attempts, last_error) for message_id, attempts, last_error in found}


async def emitted(context: Context, subject: str = "order_counted") -> Counter[str]:
    """Count, by message id, what the event stream holds of one event's name."""
    wanted = f"{context.name}.event.{subject}.v1"
    return Counter(
        (message.headers or {})["Nats-Msg-Id"]
        for message in await context.stored(context.events)
        if message.subject == wanted
    )
