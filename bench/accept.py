"""Accepting: batches of 500 at one broker, fresh and again as duplicates, beside the same statement in a bare loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp
import asyncpg
import msgspec
from asyncpg.pgproto.pgproto import UUID

from bench.load import message
from bench.mailroom import Broker, broker
from bench.report import Measured, Ratio, judge, show
from broker.authentication import Member, digest
from broker.config import RetentionConfig
from broker.database import QUERIES, Database
from broker.incoming import Item, check, event, read_item, split
from broker.store import AcceptStore, Candidate, MessageIds
from postroom._wire.accept import AcceptResponse, RawAcceptItem
from postroom._wire.message import MAX_BODY_BYTES, prepare

BATCH: Final = 500
BATCHES: Final = 60
_AT_ONCE: Final = 4  # as a relay posts
_ACCEPT_GOAL: Final = 0.4
_DUPLICATE_GOAL: Final = 2.0


def accept(directory: Path, runs: int, seconds: float) -> None:
    """Measure the broker; `seconds` has no meaning here, a run is so many batches."""
    del seconds
    asyncio.run(_accept(directory, runs))


async def _accept(directory: Path, runs: int) -> None:
    fresh, again, bare = [], [], []
    async with broker(directory / "broker") as running:
        for run in range(runs):
            bodies = batches(f"r{run}")
            bare.append(await _bare_loop(running, batches(f"b{run}")))
            fresh.append(await post(running, bodies, expected=201))
            again.append(await post(running, bodies, expected=200))
    print(f"accept, batches of {BATCH}, 1 recipient")
    show(Measured("POST /v1/accept, fresh", fresh))
    show(Measured("POST /v1/accept, duplicates", again))
    show(Measured("the statement in a bare loop", bare))
    judge(Ratio("fresh, of the bare loop", list(zip(fresh, bare, strict=True)), _ACCEPT_GOAL))
    judge(Ratio("duplicates, of fresh", list(zip(again, fresh, strict=True)), _DUPLICATE_GOAL))


def batches(prefix: str) -> list[bytes]:
    """Encode the batches of one run, ids in time order."""
    return [_batch(range(first, first + BATCH), prefix) for first in range(0, BATCH * BATCHES, BATCH)]


def _batch(numbers: Sequence[int], prefix: str) -> bytes:
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


async def post(running: Broker, bodies: Sequence[bytes], *, expected: int) -> float:
    """Post every batch, four at once; messages a second. Raises `RuntimeError` at any other answer than `expected`."""
    waiting = iter(bodies)
    headers = {"Authorization": f"Bearer {running.token}", "Content-Type": "application/json"}

    async def work(session: aiohttp.ClientSession) -> None:
        for body in waiting:
            async with session.post(f"{running.url}/v1/accept", data=body) as answer:
                data = await answer.read()
            response = msgspec.json.decode(data, type=AcceptResponse)
            if {one.status for one in response.answers} != {expected}:
                raise RuntimeError(f"not all answers are {expected}: {response.answers[0]}")

    began = time.perf_counter()
    async with aiohttp.ClientSession(headers=headers) as session:
        await asyncio.gather(*(work(session) for _ in range(_AT_ONCE)))
    return len(bodies) * BATCH / (time.perf_counter() - began)


async def _bare_loop(running: Broker, bodies: Sequence[bytes]) -> float:
    """Run the broker's own statement on one connection, everything around it prepared beforehand."""
    database = await Database.open(running.database_url, connections=1)
    ids = MessageIds()
    store = AcceptStore(database, RetentionConfig(), ids)
    sender = await _sender(running)
    values = [_values(store, sender, _candidates(body), ids.mint(BATCH)) for body in bodies]
    began = time.perf_counter()
    for row in values:
        await database.accepting.fetch(QUERIES["accept"], *row)
    took = time.perf_counter() - began
    await database.close()
    return len(bodies) * BATCH / took


def _values(store: AcceptStore, sender: Member, candidates: list[Candidate], minted: Sequence[UUID]) -> tuple[Any, ...]:
    events = [
        event(item, checked, str(message_id), sender.mesh, sender.name)
        for (item, checked), message_id in zip(candidates, minted, strict=True)
    ]
    return store._values(sender, candidates, minted, events)  # noqa: SLF001 - the baseline


def _candidates(body: bytes) -> list[Candidate]:
    read = (read_item(position, raw) for position, raw in enumerate(split(body, BATCH)))
    items = [item for item in read if isinstance(item, Item)]
    return [Candidate(item, check(item, MAX_BODY_BYTES)) for item in items]


async def _sender(running: Broker) -> Member:
    connection = await asyncpg.connect(running.database_url)
    row = await connection.fetchrow(QUERIES["find_members_by_token"], [digest(running.token)])
    await connection.close()
    assert row is not None  # noqa: S101 - the broker has just made it
    return Member(*row)
