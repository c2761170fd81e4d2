"""The whole way: sends at a steady rate to a daemon, which come through broker, worker and consumer to a handler.

Everything runs on the same cores, this process included. The times are those of one clock: the sender's, the broker's
transaction's (in the event's headers), JetStream's for each message, and the handler's.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Final, NamedTuple

import nats

from bench.load import message, percentiles
from bench.mailroom import MESH, Broker, broker
from bench.processes import Daemon, Handler, await_http, daemon, free_port, handler, program
from embedded import EmbeddedNats
from postroom import AsyncClient
from postroom.delivery.subjects import stream_name

RATE: Final = 200  # sends a second
STAGES: Final = ("send to accept", "accept to published", "published to handler", "send to handler")
_WARM_UP: Final = 200  # messages whose times do not count
_POLL_SECONDS: Final = 0.1
_PATIENCE: Final = 60.0  # seconds


class Noted(NamedTuple):
    """When an event was accepted and published, in seconds since the epoch, and the id that its sender gave it."""

    client_message_id: str
    accepted: float
    published: float


async def travel(directory: Path, seconds: float) -> dict[str, tuple[float, float]]:
    """Send for so many seconds; the p50 and the p99 of each stage, in seconds."""
    directory.mkdir(mode=0o711)  # noqa: ASYNC240 - nothing else runs yet
    server = EmbeddedNats(directory / "nats")
    url = server.start()
    try:
        async with broker(directory / "broker") as running:
            with _programs(directory, url, running) as (daemon_, receiver):
                sent = await _send(daemon_.socket, receiver, round(RATE * seconds))
                return _stages(sent, await _noted(url, len(sent) + _WARM_UP), receiver.times())
    finally:
        server.stop()


@contextmanager
def _programs(directory: Path, nats_url: str, running: Broker) -> Iterator[tuple[Daemon, Handler]]:
    """Run all that is behind a broker, and a daemon before it."""
    servers = {"POSTROOM_NATS_URL": nats_url, "POSTROOM_DATABASE_URL": running.database_url}
    port = str(free_port())
    page = {"POSTROOM_WORKER_LISTEN_PORT": port, "POSTROOM_WORKER_LOG_LEVEL": "error"}
    with ExitStack() as stack:
        receiver = stack.enter_context(handler(directory))
        stack.enter_context(
            program(directory / "worker.log", "postroom.worker", "run", environment={**servers, **page})
        )
        await_http(f"http://127.0.0.1:{port}/ready")
        words = ["consumer", "run", "--context", MESH, "--name", "bench", "--handler", receiver.url]
        stack.enter_context(program(directory / "consumer.log", "cli", *words, environment=servers))
        yield stack.enter_context(daemon(directory / "daemon", broker=running.url, token=running.token)), receiver


async def _send(socket: Path, receiver: Handler, count: int) -> dict[str, float]:
    """Send `count` messages at the rate, after some that warm everything up; return when each was sent, by its id."""
    await _steadily(socket, [f"warm-{number}" for number in range(_WARM_UP)])
    await _handled(receiver, _WARM_UP)
    sent = await _steadily(socket, [f"way-{number}" for number in range(count)])
    await _handled(receiver, _WARM_UP + count)
    return sent


async def _steadily(socket: Path, ids: Sequence[str]) -> dict[str, float]:
    """Send a message under each id, one every 1/RATE s, whatever becomes of those before it."""
    body, sent = json.loads(message())["body"], {}
    clock = asyncio.get_running_loop().time
    async with AsyncClient(socket) as client, asyncio.TaskGroup() as group:
        began = clock()
        for number, name in enumerate(ids):
            await asyncio.sleep(began + number / RATE - clock())
            sent[name] = time.time()
            group.create_task(client.send("topic:orders", body, client_message_id=name))
    return sent


async def _handled(receiver: Handler, count: int) -> None:
    """Return when the handler has seen so many messages; raises `TimeoutError`."""
    async with asyncio.timeout(_PATIENCE):
        while (await asyncio.to_thread(receiver.calls)).count < count:  # noqa: ASYNC110 - another process counts
            await asyncio.sleep(_POLL_SECONDS)


async def _noted(nats_url: str, count: int) -> dict[str, Noted]:
    """Read from the stream what the sender and the server noted of each event, by its message id."""
    connection = await nats.connect(nats_url)
    js = connection.jetstream()
    found = {}
    for sequence in range(1, count + 1):
        stored = await js.get_msg(stream_name(MESH, "events"), sequence)
        headers, payload = stored.headers or {}, json.loads(stored.data or b"")
        accepted = datetime.fromisoformat(headers["X-Occurred-At"])
        published = datetime.fromisoformat(str(stored.time))
        noted = Noted(payload["client_message_id"], accepted.timestamp(), published.timestamp())
        found[headers["Nats-Msg-Id"]] = noted
    await connection.close()
    return found


def _stages(
    sent: Mapping[str, float], noted: Mapping[str, Noted], handled: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Sum up how long each message took from one point to the next, and from the first to the last."""
    trips = [
        (sent[event.client_message_id], event.accepted, event.published, handled[message_id])
        for message_id, event in noted.items()
        if event.client_message_id in sent
    ]
    spans = [(one[1] - one[0], one[2] - one[1], one[3] - one[2], one[3] - one[0]) for one in trips]
    return {stage: percentiles(values) for stage, values in zip(STAGES, zip(*spans, strict=True), strict=True)}
