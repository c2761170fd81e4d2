"""NATS goes away under a working agent: nothing is lost, nothing happens twice."""

import os
import shutil
import signal
from pathlib import Path

import msgspec
from support.agents import SETTINGS, Counting, Tally, emitted, kept, place_orders, running_agent, settled
from support.jetstream import Context
from support.waiting import until, until_so

from embedded import EmbeddedNats
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings

ORDERS = 300

RECORD = msgspec.structs.replace(SETTINGS, check_seconds=0.05)


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

            await until_so(some_are_handled, "the agent is at work")
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGSTOP)
            await until(lambda: running.runtime.publisher.trouble is not None)
            os.kill(server.process.pid, signal.SIGCONT)
            await until(lambda: running.runtime.publisher.trouble is None)
            server.stop()
            server.start()

            async def all_are_done() -> bool:
                return running.runtime.counters.published == 2 * ORDERS and not running.consumers[0].in_hand

            await until_so(all_are_done, "everything is published and acknowledged")
            await settled(context)
            assert running.runtime.state == Tally(ORDERS, 2 * ORDERS)
        assert set(Counting.runs.values()) == {1}
        counts = await emitted(context)
        assert (len(counts), set(counts.values())) == (2 * ORDERS, {1})
        assert all(event.published for event in kept(tmp_path) if event.role == "emitted")
    finally:
        await connection.close()
        server.stop()


async def test_every_effect_is_there_after_purges_and_a_lost_store(short_directory: Path, tmp_path: Path):
    Counting.runs.clear()
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    connection = await connect(NatsSettings(url=server.url, reconnect_seconds=0.05), name="test", patience=20)
    try:
        context = Context(connection)
        await context.declare()
        orders = [f"order-{number}" for number in range(ORDERS)]
        await place_orders(context, orders)
        async with running_agent(context, tmp_path, ack_wait_seconds=1, batch=10, settings=RECORD) as running:
            counters = running.runtime.counters

            async def some_are_handled() -> bool:
                return counters.handled >= ORDERS // 10

            await until_so(some_are_handled, "the agent is at work")
            await context.js.purge_stream(context.events)
            server.stop()
            shutil.rmtree(short_directory / "nats" / "jetstream")
            server.start()

            async def declared() -> bool:
                try:
                    await context.declare()
                except Exception:  # noqa: BLE001 - the server is still starting
                    return False
                return True

            await until_so(declared, "the streams are there again")
            await place_orders(context, [f"{order}/1" for order in orders])  # as the worker's record does

            async def every_effect_is_there() -> bool:
                effects = {message_id.partition("/")[0] for message_id in await emitted(context)}
                return counters.handled == ORDERS and len(effects) == 2 * ORDERS

            await until_so(every_effect_is_there, "every effect is there")
            await settled(context)
            assert running.runtime.state == Tally(ORDERS, 2 * ORDERS)
        assert set(Counting.runs.values()) == {1}
        assert await context.letters() == []
    finally:
        await connection.close()
        server.stop()


async def test_a_paused_nats_costs_an_agent_nothing_but_time(short_directory: Path, tmp_path: Path):
    Counting.runs.clear()
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    connection = await connect(NatsSettings(url=server.url), name="test", patience=20)
    try:
        context = Context(connection)
        await context.declare()
        await place_orders(context, [f"order-{number}" for number in range(ORDERS)])
        async with running_agent(context, tmp_path, settings=RECORD, ack_wait_seconds=1, batch=10) as running:

            async def some_are_handled() -> bool:
                return running.runtime.counters.handled >= ORDERS // 10

            async def silence_is_noticed() -> bool:
                return not running.consumers[0]._pull.sure

            await until_so(some_are_handled, "the agent is at work")
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGSTOP)
            try:
                await until_so(silence_is_noticed, "the silence is noticed")
            finally:
                os.kill(server.process.pid, signal.SIGCONT)

            async def all_are_done() -> bool:
                return running.runtime.counters.published == 2 * ORDERS and not running.consumers[0].in_hand

            await until_so(all_are_done, "everything is published and acknowledged")
            await settled(context)
            assert running.runtime.state == Tally(ORDERS, 2 * ORDERS)
        assert set(Counting.runs.values()) == {1}
        assert set((await emitted(context)).values()) == {1}
        assert len(await emitted(context)) == 2 * ORDERS
        assert await context.letters() == []
    finally:
        await connection.close()
        server.stop()
