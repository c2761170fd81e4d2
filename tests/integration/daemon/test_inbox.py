"""A daemon's inbox from end to end: what is published to its member is in the file once, and readers get it once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import msgspec
import pytest
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError
from support.inboxes import message, wire
from support.mailroom import LoneDaemon
from support.receiving import ids_in, publish, received, receiving_daemon, stream_of
from support.zygote import Zygote

from postroom import AsyncClient, EventsQuery, InboxMessage, NotFound
from postroom._wire.dead_letters import DeadLetter
from postroom.delivery.subjects import stream_name

_meshes = count(1)


@pytest.fixture
def mesh() -> str:
    return f"inbox_{next(_meshes)}"


@pytest.fixture
async def js(nats_url: str, mesh: str) -> AsyncIterator[JetStreamContext]:
    async with stream_of(nats_url, mesh) as js:
        yield js


@pytest.fixture
async def daemon(
    short_directory: Path,
    nats_url: str,
    mesh: str,
    js: JetStreamContext,  # noqa: ARG001
    zygote: Zygote,
) -> AsyncIterator[LoneDaemon]:
    daemon = receiving_daemon(short_directory, nats_url, mesh, zygote)
    await daemon.start()
    yield daemon
    daemon.stop()


def messages(mesh: str, *numbers: int) -> list:
    return [message(number, mesh=mesh) for number in numbers]


def ids(found: list[InboxMessage]) -> list[str]:
    return [each.client_message_id for each in found]


async def take(client: AsyncClient, number: int, query: EventsQuery | None = None, after: int | None = None) -> list:
    found = []
    async with aclosing(client.events(query, after=after)) as events:
        async for each in events:
            found.append(each)
            if len(found) == number:
                break
    return found


async def test_what_is_published_to_the_member_is_received_once_and_in_order(
    daemon: LoneDaemon, js: JetStreamContext, mesh: str
) -> None:
    await publish(js, messages(mesh, *range(1, 301)))
    async with AsyncClient(daemon.socket) as client:
        found = await received(client, 300)
        assert ids(found) == [f"id-{number}" for number in range(1, 301)]
        assert found[0].body == "message 1"
        assert [each.position for each in found] == sorted({each.position for each in found})


async def test_a_second_publish_under_another_id_is_no_second_message(
    daemon: LoneDaemon, js: JetStreamContext, mesh: str
) -> None:
    for epoch in ("", "/1", "/2"):
        for sent in messages(mesh, 1, 2):
            subject, body, headers = wire(sent)
            await js.publish(subject, body, headers={"Nats-Msg-Id": headers["Nats-Msg-Id"] + epoch})
    await publish(js, messages(mesh, 3))
    async with AsyncClient(daemon.socket) as client:
        assert ids(await received(client, 3)) == ["id-1", "id-2", "id-3"]


async def test_two_daemons_of_one_member_each_get_everything(
    daemon: LoneDaemon, js: JetStreamContext, mesh: str, nats_url: str, *, short_directory: Path, zygote: Zygote
) -> None:
    (short_directory / "other").mkdir()
    other = receiving_daemon(short_directory / "other", nats_url, mesh, zygote)
    await other.start()
    await publish(js, messages(mesh, *range(1, 51)))
    for each in (daemon, other):
        async with AsyncClient(each.socket) as client:
            assert len(await received(client, 50)) == 50
    other.stop()


async def test_another_members_messages_stay_away(daemon: LoneDaemon, js: JetStreamContext, mesh: str) -> None:
    subject, body, headers = wire(message(1, mesh=mesh), "bob")
    await js.publish(subject, body, headers=headers)
    await publish(js, messages(mesh, 2))
    async with AsyncClient(daemon.socket) as client:
        assert ids(await received(client, 1)) == ["id-2"]


@pytest.mark.parametrize("body", [b"not json", b'{"broker_message_id": "x"}', b"\xff"])
async def test_what_makes_no_sense_is_a_dead_letter_and_the_rest_arrives(
    daemon: LoneDaemon, js: JetStreamContext, mesh: str, body: bytes
) -> None:
    await js.publish(f"{mesh}.inbox.alice", body, headers={"Nats-Msg-Id": "odd"})
    await publish(js, messages(mesh, 1))
    async with AsyncClient(daemon.socket) as client:
        assert ids(await received(client, 1)) == ["id-1"]
    letter = await dead_letter(js, mesh)
    assert (letter.reason, letter.message_id, letter.data()) == ("malformed", "odd", body)


async def dead_letter(js: JetStreamContext, mesh: str) -> DeadLetter:
    while True:
        try:
            found = await js.get_last_msg(stream_name(mesh, "dlq"), f"{mesh}.dlq.inbox.v1")
        except NotFoundError:
            await asyncio.sleep(0.02)
        else:
            await js.delete_stream(stream_name(mesh, "dlq"))
            return msgspec.json.decode(found.data or b"", type=DeadLetter)


async def test_a_stream_goes_on_over_restarts_without_loss_or_repetition(
    daemon: LoneDaemon, js: JetStreamContext, mesh: str
) -> None:
    async with AsyncClient(daemon.socket, patience=60) as client:
        await publish(js, messages(mesh, *range(1, 21)))
        await received(client, 20)
        reading = asyncio.create_task(take(client, 120, after=0))
        for first in range(21, 121, 20):
            await publish(js, messages(mesh, *range(first, first + 20)))
            await daemon.restart()
        async with asyncio.timeout(60):
            found = ids(await reading)
        assert found == ids(await received(client, 120))
        assert sorted(found) == sorted(f"id-{number}" for number in range(1, 121))


async def test_a_new_stream_begins_at_the_end_or_at_a_time(daemon: LoneDaemon, js: JetStreamContext, mesh: str) -> None:
    start = datetime.now(UTC)
    await publish(js, messages(mesh, 1, 2))
    async with AsyncClient(daemon.socket) as client:
        await received(client, 2)
        assert ids(await take(client, 2, EventsQuery(since=start))) == ["id-1", "id-2"]
        reading = asyncio.create_task(take(client, 1))
        number = 3
        while not reading.done():  # the stream begins when the daemon says so: publish until it has
            await publish(js, messages(mesh, number))
            number += 1
            await asyncio.wait({reading}, timeout=0.05)
        assert ids(await reading)[0] not in {"id-1", "id-2"}


async def test_many_readers_get_the_same_each_filtered_as_it_wants(
    daemon: LoneDaemon, js: JetStreamContext, mesh: str
) -> None:
    async with AsyncClient(daemon.socket) as client:
        everything = [asyncio.create_task(take(client, 40, after=0)) for _ in range(20)]
        carols = asyncio.create_task(take(client, 20, EventsQuery(sender="carol"), after=0))
        for number in range(1, 41):
            sender = "carol" if number % 2 else "bob"
            await publish(js, [message(number, mesh=mesh, sender=sender)])
        async with asyncio.timeout(30):
            for reading in everything:
                assert ids(await reading) == [f"id-{number}" for number in range(1, 41)]
            assert ids(await carols) == [f"id-{number}" for number in range(1, 41, 2)]


async def test_a_damaged_file_is_set_aside_and_filled_anew_from_the_stream(
    daemon: LoneDaemon, js: JetStreamContext, mesh: str
) -> None:
    await publish(js, [message(number, mesh=mesh, body="x" * 2000) for number in range(1, 101)])
    async with AsyncClient(daemon.socket, patience=60) as client:
        last = (await received(client, 100))[-1].position
        daemon.process.kill()
        for part in ("inbox.db", "inbox.db-wal"):  # the log alone would mend the file
            (daemon.state / part).write_bytes(b"nonsense" * 4096)
        await daemon.start()
        found = await received(client, 100)
        assert ids(found) == [f"id-{number}" for number in range(1, 101)]
        assert found[0].position > last
    assert len(list(daemon.state.glob("inbox.db.damaged-*"))) > 0


async def test_an_inbox_that_cannot_be_opened_leaves_sending_alone(
    short_directory: Path, nats_url: str, mesh: str, zygote: Zygote
) -> None:
    daemon = receiving_daemon(short_directory, nats_url, mesh, zygote)
    (daemon.state / "inbox.db").mkdir()
    await daemon.start()
    async with AsyncClient(daemon.socket, patience=0) as client:
        assert (await client.send("topic:orders", "hello")).status == "queued"
        with pytest.raises(Exception, match="the inbox is not open"):
            await client.inbox()
        health = await client.health()
        assert any("nothing arrives in the inbox" in reason for reason in health.reasons)
    daemon.stop()


async def test_a_daemon_without_nats_says_that_it_has_no_inbox(short_directory: Path, zygote: Zygote) -> None:
    daemon = LoneDaemon(short_directory, zygote=zygote)
    await daemon.start()
    async with AsyncClient(daemon.socket, patience=0) as client:
        for call in (client.inbox(), take(client, 1)):
            with pytest.raises(NotFound) as refusal:
                await call
            assert refusal.value.code == "inbox_not_configured"
    daemon.stop()
    assert not (daemon.state / "inbox.db").exists()


async def test_a_daemon_whose_nats_is_away_starts_sends_and_stops(
    short_directory: Path, mesh: str, zygote: Zygote
) -> None:
    daemon = receiving_daemon(short_directory, "nats://127.0.0.1:9", mesh, zygote)
    await daemon.start()
    async with AsyncClient(daemon.socket, patience=5) as client:
        assert (await client.send("topic:orders", "hello")).status == "queued"
        assert (await client.inbox()).messages == []
        assert any("NATS is unreachable" in reason for reason in (await client.health()).reasons)
    assert daemon.process.stop() == 0
    assert ids_in(daemon.state) == []
