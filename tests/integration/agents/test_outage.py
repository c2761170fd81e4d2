"""NATS goes away under a working agent: nothing is lost, nothing happens twice."""

from pathlib import Path

from agents import Counting, Tally, emitted, kept, place_orders, running_agent, settled
from jetstream import Context, until

from delivery.nats import connect
from delivery.settings import NatsSettings
from embedded import EmbeddedNats

ORDERS = 300


async def test_an_agent_goes_on_when_nats_comes_back(short_directory: Path, tmp_path: Path):
    Counting.runs.clear()
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    connection = await connect(NatsSettings(url=server.url, reconnect_seconds=0.05), name="test", patience=20)
    try:
        context = Context(connection)
        await context.declare()
        await place_orders(context, [f"order-{number}" for number in range(ORDERS)])
        async with running_agent(context, tmp_path, ack_wait_seconds=1, batch=10) as running:

            async def some_are_handled() -> bool:
                return running.runtime.counters.handled >= ORDERS // 10

            await until(some_are_handled, "the agent is at work")
            server.stop()
            server.start()

            async def all_are_done() -> bool:
                return running.runtime.counters.published == 2 * ORDERS and not running.consumers[0].in_hand

            await until(all_are_done, "everything is published and acknowledged")
            await settled(context)
            assert running.runtime.state == Tally(ORDERS, 2 * ORDERS)
        assert set(Counting.runs.values()) == {1}
        counts = await emitted(context)
        assert (len(counts), set(counts.values())) == (2 * ORDERS, {1})
        assert all(event.published for event in kept(tmp_path) if event.role == "emitted")
    finally:
        await connection.close()
        server.stop()
