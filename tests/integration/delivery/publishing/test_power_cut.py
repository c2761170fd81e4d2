"""A power cut takes what JetStream acknowledged last, while a worker is stopped before it has marked that."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import pytest
from asyncpg import UniqueViolationError

from chassis.postgres import Connection
from delivery.publishing import EVENTS, Source
from embedded import EmbeddedNats

SAME_PLACE = (
    "UPDATE postroom.outbox_events SET published_at = now(), stream = 'S', stream_created_at = 'epoch', "
    "stream_sequence = 1"
)


class Stopping(Source):
    """Events whose worker stops when JetStream has acknowledged them, until it is told to go on."""

    async def mark_published(self, connection: Connection, *values: Any) -> Any:
        self.acknowledged.set()
        await self.goes_on.wait()
        return await super().mark_published(connection, *values)

    @classmethod
    def make(cls) -> Stopping:
        source = cls(**vars(EVENTS))
        vars(source).update(acknowledged=asyncio.Event(), goes_on=asyncio.Event())
        return source


class ForgetfulNats(EmbeddedNats):
    """A server that can go back to what it had on disk."""

    def remember(self) -> None:
        self.stop()
        shutil.copytree(self.directory / "jetstream", self.directory / "remembered")
        self.start()

    def lose_power(self) -> None:
        self.stop()
        shutil.rmtree(self.directory / "jetstream")
        shutil.copytree(self.directory / "remembered", self.directory / "jetstream")
        self.start()


@pytest.fixture
async def server(short_directory: Path) -> AsyncIterator[ForgetfulNats]:
    server = ForgetfulNats(short_directory / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def exposed(office: Any, server: ForgetfulNats) -> AsyncIterator[Any]:
    """The office, on that server."""
    client = await nats.connect(server.url)
    yield replace(office, nats_url=server.url, js=client.jetstream())
    await client.close()


async def test_what_was_lost_before_its_mark_is_published_again_though_another_has_its_number(
    exposed: Any, server: ForgetfulNats
) -> None:
    await exposed.add_stream()
    server.remember()
    lost = await exposed.emit("a")
    slow, quick = exposed.publisher(source=Stopping.make()), exposed.publisher()
    step = asyncio.create_task(slow.step())
    await slow.source.acknowledged.wait()
    server.lose_power()
    kept = await exposed.emit("b")
    await quick.step()
    slow.source.goes_on.set()
    await step

    while await quick.step():
        pass
    assert await exposed.unpublished() == 0
    assert {identity.partition("/")[0] for identity in await exposed.ids()} == {lost, kept}
    await asyncio.gather(slow.stop(), quick.stop())


async def test_no_two_events_are_marked_with_one_number(office: Any) -> None:
    """Also where two workers mark at the same time: the second fails, and publishes again."""
    await office.emit()
    await office.emit()
    with pytest.raises(UniqueViolationError):
        await office.pool.execute(SAME_PLACE)
