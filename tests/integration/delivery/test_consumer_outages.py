"""The consumer core while NATS is killed, paused, purged or emptied under it: everything still has its effect."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path

import pytest
from nats.errors import Error
from structlog.testing import capture_logs
from support.jetstream import DURABLE, Context, Script
from support.nats_users import NatsWithUsers
from support.waiting import until, until_so

from embedded import EmbeddedNats
from postroom.claims import DONE, Dead, Done
from postroom.delivery import pull
from postroom.delivery.message import Delivery
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings
from postroom.errors import Unavailable

FAST = {"connect_seconds": 1.0, "reconnect_seconds": 0.05, "ping_seconds": 0.5}


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notice within a second what takes a few in earnest."""
    monkeypatch.setattr(pull, "HEARTBEAT_SECONDS", 0.3)
    monkeypatch.setattr(pull, "SILENCE_SECONDS", 0.8)
    monkeypatch.setattr(pull, "TICK_SECONDS", 0.05)
    monkeypatch.setattr(pull, "RETRY_SECONDS", 0.1)


@pytest.fixture
async def server(short_directory: Path) -> AsyncIterator[EmbeddedNats]:
    """A NATS of this test's own."""
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def own(server: EmbeddedNats) -> AsyncIterator[Context]:
    """A context on a server that the test may break."""
    connection = await connect(NatsSettings(url=server.url, **FAST), name="test", patience=20)
    context = Context(connection)
    await context.declare()
    yield context
    await connection.close()


def kill(server: EmbeddedNats) -> None:
    """End the server as a power cut does, but with what the kernel had already."""
    process = server.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    server.stop()


async def reached(consumer_script: Script, ids: set[str]) -> None:
    await until_so(lambda: _is(lambda: ids <= set(consumer_script.ids())), f"all {len(ids)}")


async def test_a_killed_nats_is_found_again_and_nothing_is_lost(server: EmbeddedNats, own: Context) -> None:
    first, second = ({f"{half}{number}" for number in range(200)} for half in "ab")
    await own.publish(sorted(first))
    script = Script(_slowly)
    async with own.consuming(script, ack_wait_seconds=1, max_ack_pending=20):
        await script.saw(50)
        kill(server)
        server.start()
        await until_so(lambda: _exists(own), "it is back")
        await own.publish(sorted(second))
        await reached(script, first | second)
        await own.settled()
    assert await own.letters() == []


async def test_what_is_done_while_nats_is_away_is_acknowledged_when_it_is_back(
    server: EmbeddedNats, own: Context
) -> None:
    await own.publish(["a"])
    gate = asyncio.Event()

    async def wait(_: Delivery) -> Done:
        await gate.wait()
        return DONE

    script = Script(wait)
    async with own.consuming(script, ack_wait_seconds=3600) as consumer:
        await script.saw(1)
        kill(server)
        await until_so(lambda: _is(lambda: not own.connection.is_connected), "the connection is lost")
        gate.set()  # sooner, the ack could go into the socket of the dead server, and the message come after `ack_wait`
        server.start()
        await until_so(lambda: _exists(own), "it is back")
        await own.settled()
        assert consumer.counters.done >= 1
    assert set(script.ids()) == {"a"}  # a killed server may have forgotten that it was delivered


async def test_a_paused_nats_goes_on_where_it_was(server: EmbeddedNats, own: Context) -> None:
    ids = {str(number) for number in range(300)}
    await own.publish(sorted(ids))
    script = Script(_slowly)
    process = server.process
    assert process is not None
    async with own.consuming(script, ack_wait_seconds=1, max_ack_pending=20) as consumer:
        await script.saw(50)
        os.kill(process.pid, signal.SIGSTOP)
        try:
            await until_so(lambda: _is(lambda: not consumer._pull.sure), "the silence is noticed")
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await reached(script, ids)
        await own.settled()


async def test_a_purged_stream_takes_what_nobody_has_seen_and_the_rest_goes_on(own: Context) -> None:
    await own.publish(str(number) for number in range(100))
    gate = asyncio.Event()

    async def wait(_: Delivery) -> Done:
        await gate.wait()
        return DONE

    script = Script(wait)
    async with own.consuming(script, max_ack_pending=10):
        await script.saw(10)
        await own.js.purge_stream(own.events)
        gate.set()
        await own.publish(["after"])
        await reached(script, {"after"})
        await own.settled()
    assert len(script.seen) == 11


async def delete_consumer(context: Context) -> None:
    await context.js.delete_consumer(context.events, DURABLE)


async def delete_stream(context: Context) -> None:
    await context.js.delete_stream(context.events)


@pytest.mark.parametrize("delete", [delete_consumer, delete_stream])
async def test_what_is_deleted_under_a_consumer_is_made_anew(own: Context, delete: Callable[[Context], object]) -> None:
    await own.publish(["before"])
    script = Script()
    async with own.consuming(script):
        await script.saw(1)
        await own.settled()
        await delete(own)  # type: ignore[misc]
        await until_so(lambda: _exists(own), "the consumer is there again")
        await own.publish(["after"])
        await reached(script, {"after"})
        await own.settled()


async def test_an_ack_for_a_message_of_a_consumer_that_is_gone_settles_nothing_of_the_new_one(own: Context) -> None:
    await own.publish(["old"])
    gate = asyncio.Event()

    async def wait(delivery: Delivery) -> Done:
        if delivery.message_id == "old":
            await gate.wait()
        return DONE

    script = Script(wait)
    async with own.consuming(script, ack_wait_seconds=3600) as consumer:
        await script.saw(1)
        await own.js.delete_stream(own.events)
        await until_so(lambda: _exists(own), "the consumer is there again")
        epoch = (await own.info()).created
        await until_so(lambda: _is(lambda: consumer._pull._epoch == epoch), "it is known to be another")
        gate.set()
        await until_so(lambda: _is(lambda: consumer.in_hand == 0), "the old one is forgotten")
        assert consumer.counters.done == 0
        await own.publish(["new"])  # has the sequence that the old one had
        await reached(script, {"new"})
        await own.settled()
    assert consumer.counters.done == 1


async def test_a_store_that_vanished_is_declared_again_and_new_messages_arrive(
    server: EmbeddedNats, own: Context
) -> None:
    await own.publish(str(number) for number in range(50))
    script = Script(_slowly)
    async with own.consuming(script, max_ack_pending=5):
        await script.saw(10)
        kill(server)
        shutil.rmtree(server.directory / "jetstream")
        server.start()
        await until_so(lambda: _exists(own), "stream and consumer are there again")
        await own.publish(["after"])
        await reached(script, {"after"})
        await own.settled()


async def test_a_dead_letter_stream_that_vanished_is_declared_again(own: Context) -> None:
    await own.js.delete_stream(own.dlq)
    await own.publish(["a"])
    script = Script(lambda _: Dead("unprocessable", "no"))
    async with own.consuming(script):
        await script.saw(1)
        await own.settled()
    assert [letter.message_id for letter in await own.letters()] == ["a"]


async def test_a_connection_that_was_closed_for_good_ends_the_consumer(own: Context) -> None:
    consumer = own.consumer(Script())
    task = asyncio.create_task(consumer.run())
    await until_so(lambda: _is(lambda: consumer._pull.sure), "it runs")
    await own.connection.close()
    with pytest.raises(Unavailable, match="closed"):
        await task
    await consumer.stop()


async def test_a_stream_that_is_missing_is_logged_once_however_often_it_is_looked_for(
    own: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    find = pull.Pull._find

    async def counted(self: pull.Pull) -> datetime:
        looks.append(self)
        return await find(self)

    monkeypatch.setattr(pull.Pull, "_find", counted)
    with capture_logs() as lines:
        async with own.consuming(Script(_slowly), stream="LATER") as consumer:
            await until_so(lambda: _is(lambda: len(looks) > 3), "it was looked for several times")
            assert "LATER" in (consumer.trouble or "")
            await own.js.add_stream(name="LATER", subjects=["later.>"])
            await until_so(lambda: _is(lambda: consumer.trouble is None), "it is found")
        await own.js.delete_stream("LATER")
    assert [line["event"] for line in lines].count("consumer_unavailable") == 1


async def _exists(context: Context) -> bool:
    try:
        await context.info()
    except (Error, TimeoutError):
        return False
    return True


async def _is(condition: Callable[[], object]) -> bool:
    return bool(condition())


async def _slowly(_: Delivery) -> Done:
    await asyncio.sleep(0.001)
    return DONE


async def test_a_reader_that_gets_nothing_though_messages_wait_says_so(
    own: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "WATCH_SECONDS", 0.2)
    held = asyncio.Event()

    async def hold(_: Delivery) -> Done:
        await held.wait()
        return DONE

    script = Script(hold)
    async with own.consuming(script) as consumer:
        await own.publish(["a"])
        await script.saw(1)
        assert consumer.trouble is None
        info = await own.js.consumer_info(own.events, DURABLE)
        await own.js.add_consumer(own.events, info.config.evolve(max_ack_pending=1))
        await own.publish(["b", "c"])
        await until_so(lambda: _is(lambda: "2 messages wait" in (consumer.trouble or "")), "it says what waits")
        held.set()
        await script.saw(3)
        await until_so(lambda: _is(lambda: consumer.trouble is None), "it says nothing more")


@pytest.mark.parametrize("denied", ["$JS.API.CONSUMER.MSG.NEXT.>", "$JS.ACK.>"])
async def test_a_consumer_that_nats_does_not_let_ask_or_acknowledge_says_so_until_it_may(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch, denied: str
) -> None:
    monkeypatch.setattr(pull, "WATCH_SECONDS", 1.0)
    needed = {"$JS.API.CONSUMER.MSG.NEXT.>", "$JS.ACK.>", "$JS.API.CONSUMER.INFO.>", "$JS.API.CONSUMER.CREATE.>"}
    allowed = [*(needed - {denied}), "$JS.API.STREAM.INFO.*"]
    server = NatsWithUsers(short_directory / "nats", {"consumer": (allowed, ["_INBOX.>"])})
    server.start()
    admin = await connect(NatsSettings(url=server.url, **FAST), name="test", patience=20)
    user = await connect(NatsSettings(url=server.url_of("consumer"), **FAST), name="test", patience=20)
    own = Context(admin)
    script = Script()
    try:
        await own.declare()
        async with Context(user, own.name).consuming(script, ack_wait_seconds=0.5) as consumer:
            await own.publish(["a"])
            said = f'publish to "{denied.removesuffix(">").lower()}'
            await until(lambda: said in (consumer.trouble or ""))
            assert "give this user that permission" in str(consumer.trouble)
            allowed.append(denied)
            server._write(server._config())
            assert server.process is not None
            os.kill(server.process.pid, signal.SIGHUP)  # it reads its config again
            await own.settled()
            await until(lambda: consumer.trouble is None)
    finally:
        await user.close()
        await admin.close()
        server.stop()
    assert set(script.ids()) == {"a"}
