"""The library's clients, as programs use them: `AsyncClient` with one task and 64, and `Client`; beside nats-py.

The peer is JetStream with `sync_interval: always`, published to from as many tasks. Both clients run in this process,
on uvloop, one after the other. A daemon whose broker is never there has nothing to relay; the last rows have one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Final, NamedTuple

import nats

from bench.driver import Load, drive, drive_threads, numbers_for, order
from bench.mailroom import broker, pid_of, running
from bench.processes import Meter, daemon
from bench.report import Measure, Results
from embedded import EmbeddedNats
from postroom import AsyncClient, Client

_SECONDS: Final = 5.0  # of each load
_TASKS: Final = {1: "one task", 64: "64 tasks"}
_SUBJECT: Final = "bench"


class _Driven(NamedTuple):
    """A load, and the CPU that client and server used for each of its messages, in µs."""

    load: Load
    client: float
    server: float


async def clients(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Send as a program does, with the relay idle and at work, beside publishing into JetStream."""
    seconds = _SECONDS * scale
    published = await _jetstream(place / "nats", seconds)
    with daemon(place / "daemon") as daemon_:
        sent = {at_once: await _send(daemon_.socket, daemon_.pid, at_once, seconds) for at_once in _TASKS}
        blocking = await _metered(daemon_.pid, asyncio.to_thread(_send_blocking, daemon_.socket, round(2000 * scale)))
    for at_once, name in _TASKS.items():
        for measure in _compared(name, sent[at_once], published[at_once]):
            yield measure
    yield Measure("`Client`, one thread: sends", blocking.load.per_second, "/s")
    yield Measure("`Client`, one thread: CPU of client + daemon", blocking.client + blocking.server, "µs")
    async with broker(place / "broker") as found:
        with daemon(place / "relaying", broker=found.url, token=found.token) as daemon_:
            relayed = await _send(daemon_.socket, daemon_.pid, 64, seconds)
    yield Measure("64 tasks, relay at work, of JetStream", relayed.load.per_second / published[64].load.per_second, "x")


async def _send(socket: Path, pid: int, at_once: int, seconds: float) -> _Driven:
    async with AsyncClient(socket) as client:

        async def send(number: int) -> object:
            return await client.send("topic:orders", order(number))

        await drive(send, range(at_once), at_once=at_once)  # opens the connections
        return await _metered(pid, drive(send, numbers_for(seconds), at_once=at_once))


def _send_blocking(socket: Path, count: int) -> Load:
    with Client(socket) as client:
        return drive_threads(lambda number: client.send("topic:orders", order(number)), range(count), at_once=1)


async def _jetstream(directory: Path, seconds: float) -> dict[int, _Driven]:
    server = EmbeddedNats(directory)
    with running(server) as url:
        connection = await nats.connect(url)
        stream = connection.jetstream()
        await stream.add_stream(name=_SUBJECT, subjects=[_SUBJECT])

        async def publish(number: int) -> object:
            return await stream.publish(_SUBJECT, order(number).encode())

        found = {
            at_once: await _metered(pid_of(server), drive(publish, numbers_for(seconds), at_once=at_once))
            for at_once in _TASKS
        }
        await connection.close()
    return found


async def _metered(server: int, work: Awaitable[Load]) -> _Driven:
    meter = Meter({"server": server})
    before = meter.cpu()["server"]
    load = await work
    used = meter.cpu()["server"] - before
    return _Driven(load, load.cpu / load.sent * 1e6, used / load.sent * 1e6)


def _compared(name: str, sent: _Driven, published: _Driven) -> list[Measure]:
    return [
        Measure(f"{name}: sends", sent.load.per_second, "/s"),
        Measure(f"{name}, of JetStream", sent.load.per_second / published.load.per_second, "x"),
        Measure(f"{name}: CPU of the client", sent.client, "µs"),
        Measure(f"{name}: CPU of the daemon", sent.server, "µs"),
        Measure(f"{name}: CPU of both", sent.client + sent.server, "µs"),
        Measure(f"{name}: CPU of nats-py", published.client, "µs"),
        Measure(f"{name}: CPU of NATS", published.server, "µs"),
        Measure(
            f"{name}: CPU of both, of JetStream's",
            (sent.client + sent.server) / (published.client + published.server),
            "x",
        ),
    ]
