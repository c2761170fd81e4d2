"""Peers that play a broker, well or badly: real servers on loopback."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.relaying import FEATURES

from broker_client import BrokerClientSettings, BrokerLink, Relay, RelaySettings
from outbox import Outbox
from outbox.model import Caller, ClaimedRow
from postroom._wire.message import prepare

TOKEN = "tok-3c1f"
Item = dict[str, Any]
Answer = dict[str, Any]
Judge = Callable[[list[Item]], web.StreamResponse | list[Answer]]


def accepted(item: Item, history_id: int = 1) -> Answer:
    return {
        "status": 201,
        "client_message_id": item["client_message_id"],
        "broker_message_id": "01HZXW5Q7T8Y9Z0A1B2C3D4E5F",
        "history_id": history_id,
        "duplicate": False,
    }


def refused(item: Item, status: int, code: str = "because", **members: Any) -> Answer:
    problem = {"type": "t", "title": "T", "status": status, "detail": "no", "code": code, "retryable": False, **members}
    return {"status": status, "client_message_id": item["client_message_id"], "problem": problem}


class ScriptedBroker:
    """A broker whose answers a test decides; it keeps the ids of every batch, and each id it accepted."""

    def __init__(self) -> None:
        self.judge: Judge = lambda items: [accepted(item) for item in items]
        self.features: Callable[[], web.StreamResponse] = lambda: web.json_response(FEATURES)
        self.batches: list[list[str]] = []
        self.done: list[str] = []
        self.asked: list[list[str]] = []
        self.tokens: list[str | None] = []
        self.at_once = 0
        self.most_at_once = 0
        self.posted = asyncio.Condition()
        self.gate = asyncio.Event()
        self.gate.set()
        self.url = ""
        self.date: Callable[[], int] | None = lambda: round(time.time() * 1000)  # ms since the epoch; None: no `Date`

    def application(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.on_response_prepare.append(self._date_it)
        app.router.add_get("/v1/features", self._features)
        app.router.add_post("/v1/accept", self._accept)
        app.router.add_post("/v1/accepted", self._accepted)
        return app

    async def _date_it(self, _request: web.Request, response: web.StreamResponse) -> None:
        if self.date is None:
            del response.headers["Date"]
        else:
            response.headers["Date"] = formatdate(self.date() / 1000, usegmt=True)

    async def _features(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization"))
        return self.features()

    async def _accept(self, request: web.Request) -> web.StreamResponse:
        self.tokens.append(request.headers.get("Authorization"))
        items = json.loads(await request.read())["messages"]
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        async with self.posted:
            self.batches.append([item["client_message_id"] for item in items])
            self.posted.notify_all()
        try:
            await self.gate.wait()
            answer = self.judge(items)
        finally:
            self.at_once -= 1
        if not isinstance(answer, list):
            return answer
        self.done += [one["client_message_id"] for one in answer if one["status"] in {200, 201}]
        return web.json_response({"answers": answer})

    async def _accepted(self, request: web.Request) -> web.StreamResponse:
        items = json.loads(await request.read())["messages"]
        self.asked.append([item["client_message_id"] for item in items])
        there = {one: {**accepted({"client_message_id": one}), "status": 200} for one in self.done}
        absent = [refused(item, 404, "not_accepted") for item in items]
        return web.json_response({"answers": [there.get(one["client_message_id"], one) for one in absent]})

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a post has made `condition` true."""
        async with self.posted:
            await self.posted.wait_for(condition)


@pytest.fixture
async def scripted_broker() -> AsyncIterator[ScriptedBroker]:
    broker = ScriptedBroker()
    async with TestServer(broker.application()) as server:
        broker.url = str(server.make_url("")).rstrip("/")
        yield broker
        broker.gate.set()


Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.fixture
async def raw_upstream() -> AsyncIterator[Callable[[Talk], Awaitable[str]]]:
    """Start a peer that reads the request's head and then talks as the test says."""
    servers: list[asyncio.Server] = []

    async def start(talk: Talk) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.readuntil(b"\r\n\r\n")
                await talk(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        servers.append(server)
        host, port = server.sockets[0].getsockname()
        return f"http://{host}:{port}"

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.touch(mode=0o600)
    file.write_text(TOKEN)
    return file


@pytest.fixture
async def link_to(token_file: Path) -> AsyncIterator[Callable[..., BrokerLink]]:
    links: list[BrokerLink] = []

    def link(url: str, **settings: Any) -> BrokerLink:
        links.append(BrokerLink(BrokerClientSettings(url=url, token_file=token_file, **settings)))
        return links[-1]

    yield link
    for one in links:
        await one.close()


@pytest.fixture
def claimed() -> Callable[[int], list[ClaimedRow]]:
    def rows(count: int) -> list[ClaimedRow]:
        payload = b'{"to":"topic:orders","body":"hello"}'
        return [ClaimedRow(f"row-{n}", f"id-{n}", bytes(32), payload, "topic:orders", 0, 0) for n in range(count)]

    return rows


class FastClock:
    """A clock that runs `speed` times faster than the machine's, and sleeps that are as much shorter."""

    def __init__(self, speed: float = 1000) -> None:
        self.speed = speed
        self._start = time.monotonic()
        self._offset = 1_795_219_200_000

    def now_ms(self) -> int:
        return self._offset + round((time.monotonic() - self._start) * 1000 * self.speed)

    def steady_ms(self) -> int:
        """Return how long it has run, whatever it was set to; without it a jump is time that has passed."""
        return round((time.monotonic() - self._start) * 1000 * self.speed)

    def jump(self, hours: float) -> None:
        self._offset += round(hours * 3_600_000)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.speed)


class Station:
    """An outbox, a link and a relay on them, as the daemon has them; `run` starts the relay's task."""

    def __init__(self, outbox: Outbox, link: BrokerLink, relay: Relay, clock: FastClock) -> None:
        self.outbox = outbox
        self.link = link
        self.relay = relay
        self.clock = clock
        self.task: asyncio.Task[None] | None = None
        self.ended = False

    def run(self) -> None:
        self.task = asyncio.create_task(self.relay.run())

    async def send(self, *ids: str, to: str = "topic:orders", **fields: str) -> None:
        message = {"to": to, "body": "b", **fields}
        sends = [prepare(json.dumps({**message, "client_message_id": one}).encode()) for one in ids]
        await self.outbox.accept(sends, Caller(0, 0))

    async def settled(self, *ids: str) -> list[Any]:
        """Wait until every one of these sends is done, dead or aborted; return their rows."""
        await self.outbox.wait_all([(await self.outbox.row(one)).id for one in ids], 30)
        return [await self.outbox.row(one) for one in ids]

    async def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        await self.relay.stop()
        if self.task is not None:
            await asyncio.gather(self.task, return_exceptions=True)
        await self.link.close()
        await self.outbox.close()


@pytest.fixture
async def station(
    tmp_path: Path, token_file: Path, scripted_broker: ScriptedBroker
) -> AsyncIterator[Callable[..., Awaitable[Station]]]:
    """Open an outbox in the test's directory with a relay to `url`; opened again, it is the same outbox."""
    stations: list[Station] = []

    async def start(
        url: str,
        *,
        speed: float = 1000,
        link: dict[str, Any] | None = None,
        name: str = "state",
        earliest: int = 0,
        steady: bool = False,
        **settings: Any,
    ) -> Station:
        clock = FastClock(speed)
        scripted_broker.date = clock.now_ms
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        broker_settings = BrokerClientSettings(**{"url": url, "token_file": token_file, **(link or {})})
        broker = BrokerLink(broker_settings, clock=clock.now_ms)
        outbox = await Outbox.open(
            directory,
            clock=clock.now_ms,
            earliest=earliest,
            look_up=broker.accepted,
            steady_clock=clock.steady_ms if steady else None,
        )
        relay = Relay(
            outbox,
            broker,
            RelaySettings(**settings),
            state_directory=directory,
            mesh="demo",
            clock=clock.now_ms,
            rng=random.Random(1),
            sleep=clock.sleep,
        )
        stations.append(Station(outbox, broker, relay, clock))
        return stations[-1]

    yield start
    for one in stations:
        await one.end()


@pytest.fixture
def answers() -> tuple[Callable[..., Answer], Callable[..., Answer]]:
    """How a message is accepted, and how it is refused."""
    return accepted, refused
