"""What a broker has committed it rings for, and nobody waits for the ring (docs/contract/delivery.md#delivery-86)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from support.waiting import until

from broker.database import QUERIES
from postroom.delivery.publication.publisher import CHANNEL

Message = Callable[..., dict[str, Any]]


async def test_an_accepted_message_wakes_the_publishers_that_it_is_for(
    broker: Any, message: Message, postgres: asyncpg.Connection[asyncpg.Record]
) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()
    await postgres.add_listener(CHANNEL, lambda *rung: heard.put_nowait(str(rung[-1])))
    alice = broker.member("alice")

    for to, sources in (
        ("dm:bob", ["deliveries"]),
        ("queue:work", ["events"]),
        ("topic:orders", ["deliveries", "events"]),
    ):
        await alice.send(message(f"id-{to}", to))
        assert sorted([await asyncio.wait_for(heard.get(), 30) for _ in sources]) == sources


async def test_many_posts_at_once_share_rings(
    broker: Any, message: Message, postgres: asyncpg.Connection[asyncpg.Record]
) -> None:
    heard: list[str] = []
    await postgres.add_listener(CHANNEL, lambda *rung: heard.append(str(rung[-1])))
    database = broker.services.database

    for _ in range(100):
        database.ring(["events"])
    await until(lambda: len(heard) > 0)
    await asyncio.gather(*(broker.member("alice").send(message(f"id-{n}", "dm:bob")) for n in range(5)))
    await until(lambda: "deliveries" in heard)
    assert heard.count("events") == 1


async def test_a_ring_that_fails_is_the_loss_of_nothing_but_time(
    broker: Any, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = {**QUERIES, "ring": "SELECT 1 / 0 / cardinality($1::text[])"}
    monkeypatch.setattr("broker.database.QUERIES", refused)
    answers = [await broker.member("alice").send_one(message(f"id-{n}")) for n in range(3)]
    assert {answer.status for answer in answers} == {201}
