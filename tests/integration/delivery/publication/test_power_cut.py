"""A power cut takes what JetStream acknowledged last, while a worker is stopped before it has marked that."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import pytest
from asyncpg import UniqueViolationError

from embedded import EmbeddedNats
from postroom.delivery.publication.postgres import EVENTS, PostgresClaim, PostgresSource
from postroom.delivery.settings import PublisherSettings, RecordSettings

SAME_PLACE = (
    "UPDATE postroom.outbox_events SET published_at = now(), stream = 'S', stream_created_at = 'epoch', "
    "stream_sequence = 1"
)


class Stopping(PostgresSource):
    """Events whose worker stops when JetStream has acknowledged them, until it is told to go on."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool, EVENTS, RecordSettings())
        self.acknowledged = asyncio.Event()
        self.goes_on = asyncio.Event()

    @asynccontextmanager
    async def claim(self, limits: PublisherSettings) -> AsyncIterator[PostgresClaim]:
        async with super().claim(limits) as claim:
            settle = claim.settle

            async def settle_later(*values: Any) -> bool:
                self.acknowledged.set()
                await self.goes_on.wait()
                return await settle(*values)

            claim.settle = settle_later  # type: ignore[method-assign]
            yield claim


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
    client = await nats.connect(server.url, reconnect_time_wait=0.05)
    yield replace(office, nats_url=server.url, js=client.jetstream())
    await client.close()


async def publish(office: Any, *aggregates: str) -> list[str]:
    """Emit an event of each aggregate, and publish all with a publisher of their own; return their ids."""
    ids = [await office.emit(aggregate) for aggregate in aggregates]
    publisher = office.publisher()
    while await publisher.step():
        pass
    await publisher.stop()
    return ids


async def publish_as_another(server: ForgetfulNats, subject: str, messages: int) -> None:
    """Publish what is in no record, on a connection of its own."""
    client = await nats.connect(server.url)
    for _ in range(messages):
        await client.jetstream().publish(subject, b"{}")
    await client.close()


@pytest.mark.parametrize("others", [1, 40])
async def test_what_was_lost_is_published_again_though_others_filled_its_numbers(
    exposed: Any, server: ForgetfulNats, others: int
) -> None:
    await exposed.add_stream()
    kept = await publish(exposed, *"abc")
    server.remember()
    lost = await publish(exposed, *"abcde")
    server.lose_power()
    await publish_as_another(server, f"{exposed.context}.event.other.v1", others)

    assert await exposed.compare(exposed.record()) == len(lost)
    await publish(exposed)
    ids = [message.headers["Nats-Msg-Id"] for message in await exposed.messages() if message.headers]
    assert sorted(ids) == sorted([*kept, *(f"{identity}/1" for identity in lost)])
    assert await exposed.compare(exposed.record()) == 0


async def test_a_lost_command_is_published_again_though_others_took_its_number_and_the_newest_are_done(
    exposed: Any, server: ForgetfulNats
) -> None:
    """Numbers that are no longer in a work queue say nothing; the one before them does."""
    subject = f"cmd.{exposed.context}.default.work.run"
    queue = f"{exposed.context}_COMMANDS".upper()
    await exposed.js.add_stream(name=queue, subjects=[f"cmd.{exposed.context}.>"], retention="workqueue")
    await publish_as_another(server, subject, 2)
    server.remember()
    for _ in range(3):
        await exposed.pool.execute("SELECT postroom.emit_command($1, 'work', '{}')", exposed.context)
    await publish(exposed)
    server.lose_power()
    await publish_as_another(server, subject, 3)
    await exposed.js.delete_msg(queue, 5)  # as an acknowledgement does

    assert await exposed.compare(exposed.record()) == 2 + 1
    assert await exposed.compare(exposed.record()) == 0


async def test_an_event_that_was_deleted_by_hand_is_not_taken_for_lost(exposed: Any) -> None:
    await exposed.add_stream()
    await publish(exposed, *"abc")
    await exposed.js.delete_msg(exposed.stream, 3)
    await exposed.js.delete_msg(exposed.stream, 2)
    assert await exposed.compare(exposed.record()) == 0


async def test_what_was_lost_before_its_mark_is_published_again_though_another_has_its_number(
    exposed: Any, server: ForgetfulNats
) -> None:
    await exposed.add_stream()
    server.remember()
    lost = await exposed.emit("a")
    slow, quick = exposed.publisher(source=Stopping(exposed.pool)), exposed.publisher()
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
