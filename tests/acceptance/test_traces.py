"""One trace of a message's whole way, as a collector gets it from the real programs (docs/monitoring.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.chain import QUEUE, Chain
from support.handlers import CountingHandler
from support.mailroom import LoneDaemon, Mailroom
from support.traces import TRACE, Collected, Collector, collecting
from support.waiting import until

from postroom import AsyncClient

TRACE_ID, SPAN_ID = TRACE.split("-")[1:3]
WAY = [
    "accept queue:counter",
    "accept topic:orders",
    "file demo.inbox.bob",
    "process cmd.demo.default.counter.run",
    "process demo.event.orders.v1",
    "publish cmd.demo.default.counter.run",
    "publish demo.event.orders.v1",
    "publish demo.inbox.alice",
    "publish demo.inbox.bob",
    "relay queue:counter",
    "relay topic:orders",
]


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    """A collector that every program of the test exports to, at once."""
    async with collecting() as running:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield running


async def test_a_messages_whole_way_is_one_trace(  # the collector has to be there before the programs are
    collector: Collector, chain: Chain, handler: CountingHandler
) -> None:
    await chain.reader_ready()
    async with AsyncClient(chain.room.socket) as client:
        for destination in ("topic:orders", QUEUE):
            await client.send(destination, '{"order": 17}', traceparent=TRACE)
        untraced = await client.send("topic:orders", '{"order": 18}')
        await client.wait(untraced.client_message_id, 60)
    await handler.saw(2)

    def of_the_trace(spans: list[Collected]) -> list[Collected]:
        return [span for span in spans if span.parent_id == SPAN_ID]

    await collector.until(lambda spans: len(of_the_trace(spans)) >= len(WAY))
    spans = of_the_trace(collector.spans)
    assert sorted(span.name for span in spans) == WAY
    assert {span.trace_id for span in collector.spans} == {TRACE_ID}  # what came without a trace has no spans
    assert not any(span.failed for span in spans)
    assert {(span.service, span.name.partition(" ")[0]) for span in spans} == {
        ("postroom-daemon", "relay"),
        ("postroom-broker", "accept"),
        ("postroom-worker", "publish"),
        ("postroom-worker", "process"),
        ("postroom-daemon", "file"),
    }


async def test_a_collector_that_is_away_holds_up_no_message_and_no_stop(
    monkeypatch: pytest.MonkeyPatch, short_directory: Path, database_url: str, redis_url: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    room = Mailroom(short_directory, database_url, redis_url)
    try:
        await room.open()
        async with AsyncClient(room.socket) as client:
            sent = [await client.send("topic:orders", f"{number}", traceparent=TRACE) for number in range(20)]
            rows = await client.wait_many([each.client_message_id for each in sent], 60)
        assert {row.status for row in rows} == {"done"}
        programs = [room.daemon, *room.brokers]
        await until(lambda: all('"library_message"' in program.log() for program in programs))  # they cannot export
        assert [await asyncio.to_thread(program.stop) for program in programs] == [0, 0]
    finally:
        room.close()


async def test_without_the_extra_a_program_says_what_to_install_and_runs(
    monkeypatch: pytest.MonkeyPatch, short_directory: Path
) -> None:
    hidden = short_directory / "hidden"
    (hidden / "opentelemetry").mkdir(parents=True)
    (hidden / "opentelemetry" / "__init__.py").write_text("raise ImportError(name='opentelemetry')")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    daemon = LoneDaemon(short_directory)
    await daemon.start()
    async with AsyncClient(daemon.socket) as client:
        assert (await client.send("topic:orders", "hello", traceparent=TRACE)).status == "queued"
    assert await asyncio.to_thread(daemon.process.stop) == 0
    assert "tracing_not_installed" in daemon.process.log()
    assert "pip install 'postroom-server[otel]'" in daemon.process.log()
