"""One context on a real JetStream: its streams, a consumer whose handler a test decides, and what came of it."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import nats
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, RawStreamMsg
from nats.js.errors import NotFoundError

from embedded import EmbeddedNats
from postroom._wire.dead_letters import DeadLetter, LetterFilter
from postroom.chassis.postgres import connected
from postroom.claims import DONE, Outcome
from postroom.delivery.consumer import Consumer, Settle
from postroom.delivery.dead_letters import DeadLetters, StreamLetters
from postroom.delivery.dead_letters.operations import LetterOperations
from postroom.delivery.message import Delivery
from postroom.delivery.publication import identifying
from postroom.delivery.settings import BackoffSettings, ConsumerSettings, NatsSettings
from postroom.delivery.streams import default_streams, ensure_stream
from support.waiting import until_so

DURABLE = "sea__from_us"
SECONDS = 60.0
QUICK = BackoffSettings(first_seconds=0.01, factor=1, most_seconds=0.01)
_numbers = itertools.count(1)


async def with_jetstream(server: EmbeddedNats, ask: Callable[[JetStreamContext], Awaitable[Any]]) -> Any:
    """Ask a server that a test has for itself, on a connection for that."""
    client = await nats.connect(server.url)
    try:
        return await ask(client.jetstream())
    finally:
        await client.close()


async def messages_in(server: EmbeddedNats, stream: str) -> list[RawStreamMsg]:
    """Return every message of a stream, the oldest first."""

    async def read(js: JetStreamContext) -> list[RawStreamMsg]:
        last = (await js.stream_info(stream)).state.last_seq
        return [await js.get_msg(stream, number) for number in range(1, last + 1)]

    return await with_jetstream(server, read)  # type: ignore[no-any-return]


def named(message_id: str) -> dict[str, str]:
    """Return the headers of a message's id; `m-1/2` is the one that a redrive gives to `m-1` the second time."""
    identity, _, epoch = message_id.partition("/")
    return identifying(identity, int(epoch or 0))


class Script:
    """A handler that notes what it is given, and says what `judge` decides; a coroutine is awaited."""

    def __init__(self, judge: Callable[[Delivery], Outcome | Awaitable[Outcome]] = lambda _: DONE) -> None:
        self.judge = judge
        self.seen: list[Delivery] = []
        self._news = asyncio.Condition()

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        await asyncio.gather(*(self._one(delivery, settle) for delivery in batch))

    async def _one(self, delivery: Delivery, settle: Settle) -> None:
        self.seen.append(delivery)
        async with self._news:
            self._news.notify_all()
        outcome = self.judge(delivery)
        await settle(delivery, await outcome if isinstance(outcome, Awaitable) else outcome)

    async def saw(self, count: int) -> None:
        async with asyncio.timeout(SECONDS), self._news:
            await self._news.wait_for(lambda: len(self.seen) >= count)

    def ids(self) -> list[str | None]:
        return [delivery.message_id for delivery in self.seen]


class Context:
    """A context of its own, so that tests share a server and nothing else."""

    def __init__(self, connection: Client, name: str | None = None) -> None:
        self.name = name or f"t{os.getpid()}_{next(_numbers)}"
        self.connection = connection
        self.js = connection.jetstream()
        self.events = f"{self.name}_EVENTS".upper()
        self.dlq = f"{self.name}_DLQ".upper()
        self.subject = f"{self.name}.event.order_placed.v1"
        self.streams = default_streams(self.name, max_bytes=None)
        self.record: str | None = None  # the URL of the database that its dead letters are kept in

    @property
    def nats(self) -> NatsSettings:
        """How to connect to the same server."""
        assert self.connection.connected_url is not None
        return NatsSettings(url=self.connection.connected_url.geturl())

    async def declare(self) -> None:
        for stream in self.streams:
            await ensure_stream(self.js, stream)

    async def remove(self) -> None:
        for stream in self.streams:
            try:
                await self.js.delete_stream(stream.name)
            except NotFoundError:
                continue

    async def publish(self, ids: Iterable[str], body: bytes = b'{"total":1}', subject: str | None = None) -> None:
        for chunk in _batched(ids, 500):
            acks = [
                await self.js.publish_async(subject or self.subject, body, headers=named(message_id))
                for message_id in chunk
            ]
            await asyncio.gather(*acks)

    def settings(self, **changes: Any) -> ConsumerSettings:
        return ConsumerSettings(**{"stream": self.events, "durable": DURABLE, "backoff": QUICK, **changes})

    def consumer(self, handler: Any, *, dead_letters: DeadLetters | None = None, **changes: Any) -> Consumer:
        return Consumer(
            self.js,
            self.settings(**changes),
            handler,
            dead_letters or StreamLetters(self.js, self.name),
            stream=self.streams[0],
            rng=random.Random(7),
        )

    @asynccontextmanager
    async def consuming(self, handler: Any, **changes: Any) -> AsyncIterator[Consumer]:
        consumer = self.consumer(handler, **changes)
        async with running(consumer):
            yield consumer

    async def info(self, durable: str = DURABLE, stream: str | None = None) -> ConsumerInfo:
        return await self.js.consumer_info(stream or self.events, durable)

    async def settled(self, durable: str = DURABLE, stream: str | None = None) -> None:
        """Return when the server has delivered the whole stream, and waits for no ack."""
        last = (await self.js.stream_info(stream or self.events)).state.last_seq

        async def idle() -> bool:
            try:
                info = await self.info(durable, stream)
            except NotFoundError:  # not made yet
                return False
            if info.delivered is None or info.delivered.stream_seq < last:  # the count of a new one lags behind
                return False
            return info.num_ack_pending == 0 and info.num_pending == 0

        await until_so(idle, "everything is settled")

    async def stored(self, stream: str) -> list[RawStreamMsg]:
        """Return the messages of a stream, in order."""
        state = (await self.js.stream_info(stream)).state
        found = []
        for sequence in range(max(1, state.first_seq), state.last_seq + 1):
            try:
                found.append(await self.js.get_msg(stream, sequence))
            except NotFoundError:
                continue
        return found

    async def letters(self) -> list[DeadLetter]:
        """Return the dead letters that the record has, or the stream where there is no record."""
        if self.record is not None:
            async with connected(self.record) as connection:
                found = await LetterOperations(connection, None, self.name, actor="").find(
                    LetterFilter(), payloads=True
                )
            return [stored.letter for stored in found if stored.letter is not None]
        return [msgspec.json.decode(message.data or b"", type=DeadLetter) for message in await self.stored(self.dlq)]


@asynccontextmanager
async def running(consumer: Consumer) -> AsyncIterator[asyncio.Task[None]]:
    """Run a consumer for the length of the block; what ends it early fails the test."""
    task = asyncio.create_task(consumer.run())
    try:
        yield task
    finally:
        await consumer.stop()
        await task


def _batched(items: Iterable[str], size: int) -> Iterable[Sequence[str]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
