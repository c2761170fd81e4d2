"""Accepting: batches at one broker beside its statement in a bare loop, at two brokers of a mesh, through a relay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import asyncpg
import msgspec
from asyncpg.pgproto.pgproto import UUID

from bench.driver import Void
from bench.load import message
from bench.mailroom import Broker, broker
from bench.processes import Daemon, daemon
from bench.report import Measure, Results
from bench.sends import STREAMS, stream
from broker.authentication import Member, digest
from broker.config import RetentionConfig
from broker.database import QUERIES, Database
from broker.items import Item, check, event, read_item, split
from broker.store import AcceptStore, Candidate, Entry, MessageIds
from embedded import EmbeddedPostgres
from postroom import AsyncClient
from postroom._wire.accept import AcceptResponse, RawAcceptItem
from postroom._wire.message import MAX_BODY_BYTES, prepare

_BATCH: Final = 500
_BATCHES: Final = 60
_SMALL: Final = 50  # messages of a post to each of two brokers: one that waits for its commit more than it works
_SMALL_POSTS: Final = 200  # to each of them
_AT_ONCE: Final = 4  # as a relay posts
_ROWS: Final = 100_000  # through a relay
_POLL_SECONDS: Final = 0.1


class SlowPostgres(EmbeddedPostgres):
    """A Postgres whose commits take 10 ms longer, as with a disk far away; those that wait at once share the time."""

    def _command(self) -> list[str]:
        return [*super()._command(), "-c", "commit_delay=10000", "-c", "commit_siblings=0"]


async def accept(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Accept batches of 500, fresh and again as duplicates."""
    count = max(2, round(_BATCHES * scale))
    async with broker(place / "broker") as running:
        bodies = _batches("f", count)
        bare = await _bare_loop(running, _batches("b", count))
        fresh = await _post(running.url, running.token, bodies, expected=201)
        again = await _post(running.url, running.token, bodies, expected=200)
    yield Measure("fresh", count * _BATCH / fresh, "/s")
    yield Measure("fresh, of the bare statement", bare / fresh, "x")
    yield Measure("duplicates, of fresh", fresh / again, "x")


async def brokers(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Accept in one mesh, every commit delayed by 10 ms: at one broker as from one relay, then at two as from two."""
    posts = max(2, round(_SMALL_POSTS * scale))
    async with broker(place / "broker", brokers=2, database=SlowPostgres) as running:
        for number, url in enumerate(running.urls):  # warms them up
            await _post(url, running.token, _batches(f"w{number}", 8, _SMALL), expected=201)
        one = await _post(running.urls[0], running.token, _batches("one", posts, _SMALL), expected=201)
        both = [
            _post(url, running.token, _batches(f"two{number}", posts, _SMALL), expected=201)
            for number, url in enumerate(running.urls)
        ]
        began = time.perf_counter()
        await asyncio.gather(*both)
        two = time.perf_counter() - began
    yield Measure("one broker", posts * _SMALL / one, "/s")
    yield Measure("two brokers", 2 * posts * _SMALL / two, "/s")
    yield Measure("two brokers, of one", 2 * one / two, "x")


async def relay(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Relay 100,000 rows from one daemon through one broker into Postgres."""
    count, rows = max(2, round(_BATCHES * scale)), round(_ROWS * scale)
    async with broker(place / "broker") as running:
        posted = count * _BATCH / await _post(running.url, running.token, _batches("p", count), expected=201)
        with daemon(place / "daemon", broker=running.url, token=running.token) as daemon_:
            drained = await _drain(daemon_, rows)
    yield Measure("rows from a daemon into Postgres", drained, "/s")
    yield Measure("of the broker's own batches", drained / posted, "x")


async def _drain(daemon_: Daemon, rows: int) -> float:
    """Fill a paused outbox, resume, and time it until every row is done; rows a second."""
    async with AsyncClient(daemon_.socket) as client:
        await client.pause_relay(reason="fill the outbox first")
        stream(daemon_, first=0, lines=rows // STREAMS)
        await client.resume_relay(reason="the outbox is full")
        began = time.perf_counter()
        while (await client.health()).rows["done"] < rows // STREAMS * STREAMS:  # noqa: ASYNC110 - another process
            await asyncio.sleep(_POLL_SECONDS)
        return rows / (time.perf_counter() - began)


def _batches(prefix: str, count: int, size: int = _BATCH) -> list[bytes]:
    """Encode batches of so many messages, ids in time order."""
    return [_encoded(range(first, first + size), prefix) for first in range(0, size * count, size)]


def _encoded(numbers: Sequence[int], prefix: str) -> bytes:
    prepared = [prepare(message(), idempotency_key=f"01J{prefix}{number:020d}") for number in numbers]
    items = [
        RawAcceptItem(
            client_message_id=send.client_message_id,
            request_fingerprint=send.fingerprint.hex(),
            message=msgspec.Raw(send.payload),
        )
        for send in prepared
    ]
    return msgspec.json.encode({"messages": items})


async def _post(url: str, token: str, bodies: Sequence[bytes], *, expected: int) -> float:
    """Post every batch, four at once, and return the seconds; raises `Void` at any other answer than `expected`."""
    waiting = iter(bodies)
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}

    async def work(session: aiohttp.ClientSession) -> None:
        for body in waiting:
            async with session.post(f"{url}/v1/accept", data=body) as answer:
                data = await answer.read()
            if answer.status != 200:  # noqa: PLR2004 - the batch's own, beside which each message has its
                raise Void(f"a batch was refused: {answer.status}: {data.decode(errors='replace')}")
            response = msgspec.json.decode(data, type=AcceptResponse)
            if {one.status for one in response.answers} != {expected}:
                raise Void(f"not all answers are {expected}: {response.answers[0]}")

    began = time.perf_counter()
    async with aiohttp.ClientSession(headers=headers) as session:
        await asyncio.gather(*(work(session) for _ in range(_AT_ONCE)))
    return time.perf_counter() - began


async def _bare_loop(running: Broker, bodies: Sequence[bytes]) -> float:
    """Run the broker's own statement on one connection, all around it prepared beforehand; return the seconds."""
    database = await Database.open(running.database_url, connections=1)
    ids = MessageIds()
    store = AcceptStore(database, RetentionConfig(), ids)
    sender = await _sender(running)
    values = [_values(store, sender, _candidates(body), ids.mint(_BATCH)) for body in bodies]
    began = time.perf_counter()
    for row in values:
        await database.accepting.fetch(QUERIES["accept"], *row, None)
    took = time.perf_counter() - began
    await database.close()
    return took


def _values(store: AcceptStore, sender: Member, candidates: list[Candidate], minted: Sequence[UUID]) -> tuple[Any, ...]:
    return store.values(
        sender,
        [
            Entry(candidate, message_id, event(*candidate, str(message_id), sender.mesh, sender.name))
            for candidate, message_id in zip(candidates, minted, strict=True)
        ],
    )


def _candidates(body: bytes) -> list[Candidate]:
    read = (read_item(position, raw) for position, raw in enumerate(split(body, _BATCH)))
    items = [item for item in read if isinstance(item, Item)]
    return [Candidate(item, check(item, MAX_BODY_BYTES)) for item in items]


async def _sender(running: Broker) -> Member:
    connection = await asyncpg.connect(running.database_url)
    row = await connection.fetchrow(QUERIES["find_members_by_token"], [digest(running.token)])
    await connection.close()
    assert row is not None  # noqa: S101 - the broker has just made it
    return Member(**row)
