"""The whole way: a topic subscribed through the socket, a send through another daemon's broker, the worker, the inbox.

And back from the broker's history alone, where the file is damaged and the stream is gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import nats
import pytest
from support.mailroom import MESH, Mailroom, Process
from support.receiving import received
from support.zygote import Zygote

from postroom import AsyncClient, BrokerClient, InboxMessage
from postroom.delivery.subjects import stream_name


@pytest.fixture
async def nats_of_mesh(nats_url: str) -> AsyncIterator[str]:
    """The session's NATS, without the streams of the mesh before and after."""
    connection = await nats.connect(nats_url)
    js = connection.jetstream()

    async def forget() -> None:
        for stream in await js.streams_info():
            if str(stream.config.name).startswith(MESH.upper()):
                await js.delete_stream(str(stream.config.name))

    await forget()
    yield nats_url
    await forget()
    await connection.close()


@pytest.fixture
async def mailroom(
    short_directory: Path, database_url: str, redis_url: str, nats_of_mesh: str, zygote: Zygote
) -> AsyncIterator[Mailroom]:
    room = Mailroom(short_directory, database_url, redis_url, zygote=zygote)
    room.daemon.settle({"POSTROOM_DAEMON_NATS_URL": nats_of_mesh})
    place = short_directory / "worker"
    place.mkdir()
    settings: dict[str, object] = {
        "POSTROOM_WORKER_DATABASE_URL": database_url,
        "POSTROOM_WORKER_NATS_URL": nats_of_mesh,
    }
    worker = Process(place, "postroom.worker", settings, "run", zygote=zygote)
    await room.open()
    worker.start()
    yield room
    room.close()
    assert worker.stop() == 0, worker.log()


def bodies(messages: list[InboxMessage]) -> list[str | None]:
    return [each.body for each in messages]


async def test_a_topic_subscribed_through_the_socket_arrives_in_the_inbox(mailroom: Mailroom) -> None:
    async with BrokerClient(mailroom.broker_urls[0], mailroom.admin_token) as administrator:
        await administrator.create_topic(MESH, "news")
    async with AsyncClient(mailroom.socket) as client:
        assert (await client.subscribe("news")).member == "alice"
        await client.send("topic:news", "first", meta={"a": 1}, client_message_id="news-1")
        await client.send("dm:alice", "second", client_message_id="dm-1")
        found = await received(client, 2)
        assert sorted(bodies(found), key=str) == ["first", "second"]
        news = next(each for each in found if each.to == "topic:news")
        assert (news.sender, news.mesh, news.client_message_id, news.meta) == ("alice", MESH, "news-1", {"a": 1})
        await client.unsubscribe("news")


async def test_a_damaged_inbox_is_filled_anew_from_the_history_where_the_stream_is_gone(
    mailroom: Mailroom, nats_of_mesh: str
) -> None:
    async with AsyncClient(mailroom.socket, patience=60) as client:
        for number in range(1, 31):
            await client.send("topic:orders", f"message {number}", client_message_id=f"id-{number}")
        expected = sorted(bodies(await received(client, 30)), key=str)
        mailroom.daemon.kill()
        connection = await nats.connect(nats_of_mesh)
        await connection.jetstream().purge_stream(stream_name(MESH, "inbox"))
        await connection.close()
        for part in ("inbox.db", "inbox.db-wal"):
            (mailroom.directory / "state" / part).write_bytes(b"nonsense" * 4096)
        mailroom.daemon.start()
        assert sorted(bodies(await received(client, 30)), key=str) == expected
        assert (await client.health()).status == "ok"
