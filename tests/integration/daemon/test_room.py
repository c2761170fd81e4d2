"""Room, through a whole daemon: after ten times `max_bytes` it sends as fast as one that was installed just now."""

from __future__ import annotations

import statistics
import time
from itertools import count
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.mailroom import LoneDaemon
from support.relaying import FEATURES
from support.waiting import until_so

from outbox.transaction import room_of
from postroom import AsyncClient, SendRequest
from postroom._wire.ids import new_id
from postroom._wire.message import prepare

MIB = 1024 * 1024
ROOM = 32 * MIB  # of a daemon
PART = 2 * MIB  # of it that a round takes


def agreeable_broker() -> web.Application:
    """A broker that accepts everything."""
    numbers = count(1)

    async def accept(request: web.Request) -> web.Response:
        ids = [item["client_message_id"] for item in msgspec.json.decode(await request.read())["messages"]]
        answers = [
            {"status": 201, "client_message_id": name, "broker_message_id": new_id(), "history_id": next(numbers)}
            for name in ids
        ]
        return web.Response(body=msgspec.json.encode({"answers": answers}), content_type="application/json")

    async def features(_: web.Request) -> web.Response:
        return web.json_response(FEATURES)

    app = web.Application(client_max_size=64 * MIB)
    app.router.add_post("/v1/accept", accept)
    app.router.add_get("/v1/features", features)
    return app


async def relayed(client: AsyncClient) -> bool:
    rows = (await client.health()).rows
    return not rows["pending"] + rows["inflight"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [100, 1024, 102_400])
async def test_after_ten_times_max_bytes_without_a_refusal_a_daemon_sends_as_fast_as_a_new_one(
    short_directory: Path, size: int
) -> None:
    message = SendRequest(to="topic:orders", body="x" * size)
    messages = PART // room_of(len(prepare(msgspec.json.encode(message)).payload))

    async def rate(daemon: LoneDaemon) -> float:
        """Send a round, and let it be relayed; return the messages a second of the sends."""
        async with AsyncClient(daemon.socket, patience=0) as client:
            began = time.perf_counter()
            async for answer in client.send_many(message for _ in range(messages)):
                assert answer.problem is None
            took = time.perf_counter() - began
            await until_so(lambda: relayed(client))
        return messages / took

    async with TestServer(agreeable_broker()) as broker:
        daemons = []
        for name in ("old", "new"):
            (directory := short_directory / name).mkdir(mode=0o711)
            url = str(broker.make_url("")).rstrip("/")
            daemons.append(LoneDaemon(directory, BROKER_URL=url, OUTBOX_MAX_BYTES=ROOM))
            await daemons[-1].start()
        old, new = daemons
        for _ in range(10 * ROOM // PART):
            await rate(old)
        await rate(new)
        pairs = [(await rate(old), await rate(new)) for _ in range(12)]
        for daemon in daemons:
            daemon.stop()
    print(f"{size} bytes:", [f"{after:.0f} of {before:.0f} /s" for after, before in pairs])  # noqa: T201
    assert statistics.median(after / before for after, before in pairs) >= 0.9
