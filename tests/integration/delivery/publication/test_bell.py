"""Publishers look as soon as they are called, whatever becomes of the bell; by themselves these would wait a minute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs
from support.waiting import until, until_so

from postroom.delivery.publication.postgres import EVENTS, PostgresClaim, PostgresSource
from postroom.delivery.publication.publisher import CHANNEL, Bell
from postroom.delivery.settings import PublisherSettings, RecordSettings

PATIENT = PublisherSettings(ack_seconds=2, first_seconds=0.01, most_seconds=0.05, idle_seconds=60)
LISTENERS = """
    SELECT pid FROM pg_stat_activity
    WHERE datname = current_database() AND query LIKE 'LISTEN%' AND state = 'idle'
"""


@pytest.fixture
def rung(office: Any, running: Any) -> Callable[..., Any]:
    """How to run publishers with a bell, from when it listens."""

    @asynccontextmanager
    async def run(*publishers: Any) -> AsyncIterator[Bell]:
        bell = Bell(office.pool, publishers)
        task = asyncio.create_task(bell.run())
        try:
            async with running(*publishers):
                await listening(office)
                yield bell
        finally:
            task.cancel()
            await asyncio.wait({task})

    return run


async def listening(office: Any) -> int:
    return int(await until_so(lambda: office.pool.fetchval(LISTENERS)))


async def notify(office: Any, source: str = "") -> None:
    await office.pool.execute("SELECT pg_notify($1, $2)", CHANNEL, source)


async def test_what_is_rung_for_is_published_at_once(office: Any, rung: Any) -> None:
    await office.add_stream()
    async with rung(office.publisher(PATIENT)):
        for source in ("", EVENTS.name):
            await office.emit()
            await notify(office, source)
            await asyncio.wait_for(office.drained(), 30)


async def test_what_is_rung_for_while_a_batch_is_under_way_is_in_the_next(office: Any, rung: Any) -> None:
    await office.add_stream()
    reached, released = asyncio.Event(), asyncio.Event()

    class Slow(PostgresSource):
        @asynccontextmanager
        async def claim(self, limits: PublisherSettings) -> AsyncIterator[PostgresClaim]:
            async with super().claim(limits) as claim:
                if claim.messages and not released.is_set():
                    reached.set()
                    await released.wait()
                yield claim

    publisher = office.publisher(PATIENT, source=Slow(office.pool, EVENTS, RecordSettings()))
    async with rung(publisher) as bell:
        await office.emit("order-1")
        bell.ring(EVENTS.name)
        await reached.wait()
        for number in range(5):
            await office.emit(f"order-{number}")
            bell.ring(EVENTS.name)
        released.set()
        await asyncio.wait_for(office.drained(), 30)
        assert (publisher.counters.published, publisher.counters.batches) == (6, 2)


async def test_what_comes_soon_after_a_batch_goes_together_where_batches_are_apart(office: Any, rung: Any) -> None:
    await office.add_stream()
    publisher = office.publisher(PATIENT, apart=2.0)
    async with rung(publisher) as bell:
        await office.emit()
        bell.ring(EVENTS.name)
        await asyncio.wait_for(office.drained(), 30)  # the first at once
        for _ in range(5):
            await office.emit()
            bell.ring(EVENTS.name)
            await asyncio.sleep(0)
        await asyncio.wait_for(office.drained(), 30)
        assert (publisher.counters.published, publisher.counters.batches) == (6, 2)


async def test_a_publisher_whose_batches_are_apart_stops_at_once(office: Any, running: Any) -> None:
    await office.add_stream()
    publisher = office.publisher(PATIENT, apart=3600)
    async with asyncio.timeout(60), running(publisher):
        await office.emit()
        publisher.wake()
        await office.drained()
        publisher.wake()


async def test_what_could_not_be_had_when_it_was_called_for_is_published_soon_after(office: Any, running: Any) -> None:
    """An accept that it waits for may be rolled back, and rings for nothing."""
    await office.add_stream()
    looks = 0
    first, written = asyncio.Event(), asyncio.Event()

    class Early(PostgresSource):
        @asynccontextmanager
        async def claim(self, limits: PublisherSettings) -> AsyncIterator[PostgresClaim]:
            async with super().claim(limits) as claim:
                yield claim
            nonlocal looks
            looks += 1
            if looks == 1:
                first.set()
            elif looks == 2:  # the one that it was called for
                await office.emit()
                written.set()

    publisher = office.publisher(PATIENT, source=Early(office.pool, EVENTS, RecordSettings()))
    async with running(publisher):
        await first.wait()
        publisher.wake()
        await written.wait()
        await asyncio.wait_for(office.drained(), 30)


async def test_a_bell_whose_connection_was_cut_listens_again_and_makes_up_for_what_it_missed(
    office: Any, rung: Any
) -> None:
    await office.add_stream()
    with capture_logs() as logged:
        async with rung(office.publisher(PATIENT)):
            before = await listening(office)
            await office.pool.execute("SELECT pg_terminate_backend($1)", before)
            await until(lambda: logged)
    assert [line["error"] for line in logged] == ["Postgres ended the connection"]
    async with rung(office.publisher(PATIENT)):
        before = await listening(office)
        await office.pool.execute("SELECT pg_terminate_backend($1)", before)
        await office.emit()
        await asyncio.wait_for(office.drained(), 30)

        assert await listening(office) != before
        await office.emit()
        await notify(office)
        await asyncio.wait_for(office.drained(), 30)


async def test_without_a_bell_a_publisher_looks_by_itself(office: Any, running: Any) -> None:
    await office.add_stream()
    async with running(office.publisher(PublisherSettings(idle_seconds=0.1))):
        await office.emit()
        await asyncio.wait_for(office.drained(), 30)
