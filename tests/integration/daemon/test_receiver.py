"""The receiver within this process: a file that fails under it, a token that becomes another member's, retention."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from nats.js import JetStreamContext
from structlog.testing import capture_logs
from support.hostile import HostileMessage, byte_writer, odd_messages, quiet_logs, random_messages
from support.inboxes import message, wire
from support.receiving import ids_in, publish, stream_of
from support.waiting import until, until_so

from broker_client.settings import BrokerClientSettings
from daemon.receiver import Receiver
from inbox import InboxSettings
from postroom._wire.accept import Features
from postroom._wire.ids import now_ms
from postroom.delivery.dead_letters import REPLAYED_FOR
from postroom.delivery.settings import NatsSettings
from postroom.errors import TryAgain

_meshes = count(1)


@pytest.fixture
def mesh() -> str:
    return f"inbox_receiver_{next(_meshes)}"


@pytest.fixture
async def js(nats_url: str, mesh: str) -> AsyncIterator[JetStreamContext]:
    async with stream_of(nats_url, mesh) as js:
        yield js


class Running:
    """A receiver that runs, and whom the broker says that its token speaks for."""

    def __init__(
        self, directory: Path, nats_url: str, mesh: str, *, clock_is_confirmed: bool = True, **settings: float
    ) -> None:
        self.state = directory / "state"
        self.member = "alice"
        self.clock_confirmed = asyncio.Event()
        if clock_is_confirmed:
            self.clock_confirmed.set()
        self.asked_for_the_time = 0
        self.mesh = mesh
        token = directory / "token"
        token.write_text("nobody checks it")
        self.receiver = Receiver(
            NatsSettings(url=nats_url),
            BrokerClientSettings(url="http://127.0.0.1:9", token_file=token),
            InboxSettings(**settings),  # type: ignore[arg-type]
            mesh=mesh,
            state_directory=self.state,
            features=lambda: Features(mesh=mesh, member=self.member, max_batch=1),
            confirmed_time=self._time,
        )
        self.task = asyncio.create_task(self.receiver.run())

    async def _time(self) -> int:
        self.asked_for_the_time += 1
        await self.clock_confirmed.wait()
        return now_ms()

    async def filed(self, number: int) -> None:
        """Wait until so many messages were filed since the start."""
        await until(lambda: self.receiver.counters.filed >= number)

    async def stop(self) -> None:
        await self.receiver.stop(5)
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Start = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start(short_directory: Path, nats_url: str, mesh: str) -> AsyncIterator[Start]:
    started: list[Running] = []

    async def begin(**settings: Any) -> Running:
        started.append(Running(short_directory, nats_url, mesh, **settings))
        await until(lambda: started[-1].receiver.trouble() is None)
        return started[-1]

    yield begin
    for each in started:
        await each.stop()


async def test_a_file_that_fails_is_opened_anew_and_nothing_is_missing(
    start: Start, js: JetStreamContext, mesh: str
) -> None:
    running = await start()
    await publish(js, [message(1, mesh=mesh)])
    await running.filed(1)
    before = running.receiver.opened()
    before.failed.set()
    await publish(js, [message(2, mesh=mesh), message(3, mesh=mesh)])
    await until(lambda: running.receiver.inbox not in (None, before))
    assert running.receiver.opened().id == before.id
    await running.filed(3)
    assert sorted(ids_in(running.state)) == ["id-1", "id-2", "id-3"]


async def put_older_back(start: Start, js: JetStreamContext, mesh: str) -> tuple[str, int]:
    """Put back a copy that lacks two of three messages; returns the file's id and the last position that it gave."""
    running = await start()
    await publish(js, [message(1, mesh=mesh)])
    await running.filed(1)
    await running.stop()
    file = running.state / "inbox.db"
    copy = file.read_bytes()
    later = await start()
    inbox = later.receiver.opened()
    await publish(js, [message(2, mesh=mesh), message(3, mesh=mesh)])
    await later.filed(2)
    given = (await inbox.page(None, None, 10)).messages[-1].position
    await later.stop()
    file.write_bytes(copy)
    return inbox.id, given


async def test_an_older_copy_of_the_file_is_noticed_and_gets_what_it_lacks(
    start: Start, js: JetStreamContext, mesh: str
) -> None:
    before, given = await put_older_back(start, js, mesh)
    with capture_logs() as lines:
        restored = await start()
        await restored.filed(2)
    assert [line["log_level"] for line in lines if line["event"] == "inbox_older"] == ["error"]
    inbox = restored.receiver.opened()
    assert (inbox.id != before, inbox.refill_after) == (True, 0)
    found = (await inbox.page(None, None, 10)).messages
    assert ids_in(restored.state) == ["id-1", "id-2", "id-3"]
    assert found[1].position > given
    (consumer,) = await js.consumers_info(f"{mesh}_INBOX".upper())
    assert consumer.name.endswith(inbox.id)


async def test_an_older_copy_is_noticed_while_a_delivery_of_before_is_still_to_come_again(
    start: Start, js: JetStreamContext, mesh: str
) -> None:
    """Up to there, and no further, JetStream says what was acknowledged."""
    running = await start()
    await running.stop()
    stream = f"{mesh}_INBOX".upper()
    (consumer,) = await js.consumers_info(stream)
    await publish(js, [message(1, mesh=mesh)])
    (held,) = await (await js.pull_subscribe_bind(consumer.name, stream)).fetch(1)
    second = await start()
    await publish(js, [message(2, mesh=mesh)])
    await second.filed(1)
    await second.stop()
    copy = (second.state / "inbox.db").read_bytes()
    await held.in_progress()
    third = await start()
    await publish(js, [message(3, mesh=mesh)])
    await third.filed(1)
    await third.stop()
    await held.in_progress()
    assert ids_in(third.state) == ["id-2", "id-3"]
    (third.state / "inbox.db").write_bytes(copy)
    restored = await start()
    await restored.filed(2)
    assert sorted(ids_in(restored.state)) == ["id-1", "id-2", "id-3"]


async def test_a_file_whose_consumer_was_lost_is_refilled_above_all_positions(
    start: Start, js: JetStreamContext, mesh: str
) -> None:
    """Nobody knows any more what that had acknowledged, and the file may be an older copy."""
    _, given = await put_older_back(start, js, mesh)
    (consumer,) = await js.consumers_info(f"{mesh}_INBOX".upper())
    await js.delete_consumer(f"{mesh}_INBOX".upper(), consumer.name)

    restored = await start()
    await restored.filed(2)
    inbox = restored.receiver.opened()
    assert inbox.refill_after == 0
    assert (await inbox.page(None, None, 10)).messages[1].position > given


async def test_a_file_that_has_everything_is_never_taken_for_an_older_one(
    start: Start, js: JetStreamContext, mesh: str, nats_url: str
) -> None:
    """Whatever became of the messages, and of the consumer: filed, known, malformed, deleted with what it counted."""
    running = await start()
    first = running.receiver.opened().id
    stream = f"{mesh}_INBOX".upper()
    with capture_logs() as lines:
        async with byte_writer(nats_url) as raw:
            await publish(js, [message(1, mesh=mesh), message(2, mesh=mesh)])
            await running.filed(2)
            await raw.publish(f"{mesh}.inbox.alice", [HostileMessage(None, b"{}")])
            await until(lambda: running.receiver.counters.refused == 1)
        await running.stop()
        for headers in (f"NATS/1.0\r\n{REPLAYED_FOR}: another\r\n\r\n".encode(), b"NATS/1.0\r\nX: \xff\r\n\r\n"):
            again = await start()
            async with byte_writer(nats_url) as raw:
                await raw.publish(f"{mesh}.inbox.alice", [HostileMessage(headers, b"{}")])

            async def all_are_settled() -> bool:
                consumers = await js.consumers_info(stream)
                return not any(each.num_pending or each.num_ack_pending for each in consumers)

            await until_so(all_are_settled)
            await again.stop()
        for number in (3, 4):
            again = await start()
            await publish(js, [message(number, mesh=mesh)])
            await again.filed(1)
            assert again.receiver.opened().id == first
            await again.stop()
            (consumer,) = await js.consumers_info(stream)
            await js.delete_consumer(stream, consumer.name)
        last = await start()
        await until(lambda: last.receiver.counters.known == 4)
        assert last.receiver.opened().id == first
    assert "inbox_older" not in {line["event"] for line in lines}


async def test_a_token_of_another_member_brings_that_members_messages(
    start: Start, js: JetStreamContext, mesh: str
) -> None:
    running = await start()
    await publish(js, [message(1, mesh=mesh)])
    await running.filed(1)
    subject, body, headers = wire(message(2, mesh=mesh, to="dm:bob"), "bob")
    await js.publish(subject, body, headers=headers)
    running.member = "bob"
    await running.filed(2)
    assert ids_in(running.state) == ["id-1", "id-2"]


async def test_a_token_that_comes_back_to_its_member_makes_no_file_an_older_one(
    start: Start, js: JetStreamContext, mesh: str
) -> None:
    running = await start()
    await publish(js, [message(1, mesh=mesh)])
    await running.filed(1)
    first = running.receiver.opened().id
    with capture_logs() as lines:
        for number, member in ((2, "bob"), (3, "alice"), (4, "bob")):
            running.member = member
            subject, body, headers = wire(message(number, mesh=mesh, to=f"dm:{member}"), member)
            await js.publish(subject, body, headers=headers)
            await running.filed(number)
    assert running.receiver.opened().id == first
    assert "inbox_older" not in {line["event"] for line in lines}


async def test_what_is_older_than_the_retention_is_deleted_once_the_clock_is_confirmed(
    start: Start, js: JetStreamContext, mesh: str
) -> None:
    running = await start()
    await publish(js, [message(1, mesh=mesh)])
    await running.filed(1)
    await running.stop()
    assert ids_in(running.state) == ["id-1"]
    again = await start(retention_days=1e-9, clock_is_confirmed=False)
    await until(lambda: again.asked_for_the_time)
    assert ids_in(again.state) == ["id-1"]
    again.clock_confirmed.set()
    await until(lambda: ids_in(again.state) == [])


async def test_a_stop_keeps_the_connection_until_nats_has_heard_of_it(
    start: Start, js: JetStreamContext, mesh: str
) -> None:
    """Else what is on its way is not handed back, and the stop waits for an answer that cannot come."""
    running = await start()
    await publish(js, [message(1, mesh=mesh)])
    await running.filed(1)
    with capture_logs() as lines:
        await running.stop()
    assert "pull_stopped_without_nats" not in {line["event"] for line in lines}


@pytest.mark.usefixtures("js")
async def test_a_receiver_that_has_stopped_says_that_it_is_not_open(start: Start) -> None:
    running = await start()
    await running.stop()
    with pytest.raises(TryAgain) as refusal:
        running.receiver.opened()
    assert refusal.value.code == "inbox_unavailable"


@pytest.mark.parametrize("seed", [None, 5], ids=["odd", "random"])
async def test_whatever_arrives_is_filed_or_buried(
    start: Start, js: JetStreamContext, mesh: str, nats_url: str, seed: int | None
) -> None:
    running = await start()
    body = wire(message(1, mesh=mesh))[1]
    numbers = [body.replace(b'"history_id":1', b'"history_id":%d' % number) for number in (2**63, 2**64, -1, 0)]
    nested = body[:-1] + b',"meta":{"a":' + b"[" * 900 + b"]" * 900 + b"}}"
    with quiet_logs():
        async with byte_writer(nats_url) as raw:
            subject = f"{mesh}.inbox.alice"
            await raw.publish(subject, odd_messages() if seed is None else random_messages(200, seed=seed))
            await raw.publish(subject, (HostileMessage(None, each) for each in [*numbers, nested]))
        await publish(js, [message(number, mesh=mesh) for number in range(1, 21)])
        await running.filed(20)

        async def all_are_answered_for() -> bool:
            (consumer,) = await js.consumers_info(f"{mesh}_INBOX".upper())
            return not consumer.num_pending and not consumer.num_ack_pending

        await until_so(all_are_answered_for)
    assert running.receiver.trouble() is None
    assert set(ids_in(running.state)) >= {f"id-{number}" for number in range(1, 21)}
