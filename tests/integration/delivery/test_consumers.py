"""Consumers that come and go: what they have done is remembered, and one that ends by itself is not overlooked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from nats.js import JetStreamContext

from postroom.delivery.consumer import ConsumerCounters
from postroom.delivery.consumers import Consumers
from postroom.delivery.settings import NatsSettings


class Reckoning:
    """A consumer that consumes nothing."""

    def __init__(self, done: int, error: Exception | None = None) -> None:
        self.counters = ConsumerCounters(done=done)
        self._error = error
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        if self._error is not None:
            raise self._error
        await self._stopped.wait()

    async def stop(self) -> None:
        self._stopped.set()


class Looked(Consumers[str, Reckoning]):
    """Consumers that a test looks after."""

    looks: Callable[[], Awaitable[None]]

    async def look(self, js: JetStreamContext) -> None:
        del js
        await self.looks()


@pytest.fixture
def consumers(nats_url: str) -> Looked:
    return Looked(NatsSettings(url=nats_url), name="test", check_seconds=0.01)


async def test_what_has_ended_still_counts_and_a_look_that_fails_is_followed_by_another(
    consumers: Looked,
) -> None:
    looks = 0

    async def look() -> None:
        nonlocal looks
        looks += 1
        match looks:
            case 1:
                raise OSError("Postgres is away")
            case 2:
                consumers.begin("gone", Reckoning(2))
                consumers.begin("stays", Reckoning(3))
            case 3:
                await consumers.end("gone")
                assert list(consumers.running) == ["stays"]
                stopping.append(asyncio.create_task(consumers.stop()))

    stopping: list[asyncio.Task[None]] = []
    consumers.looks = look
    await consumers.run()
    await stopping[0]
    assert (consumers.running, consumers.counters.done) == ({}, 5)


async def test_a_consumer_that_ends_by_itself_ends_the_program(consumers: Looked) -> None:
    async def look() -> None:
        if not consumers.running:
            consumers.begin("broken", Reckoning(0, RuntimeError("it broke")))

    consumers.looks = look
    with pytest.raises(RuntimeError, match="it broke"):
        await consumers.run()
