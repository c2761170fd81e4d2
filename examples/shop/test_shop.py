"""The shop's own tests, on the database that `SHOP_DATABASE_URL` names: what commits is told, what does not is not."""

import json
import os
from collections.abc import AsyncIterator

import asyncpg
import pytest
from aiohttp.test_utils import TestClient, TestServer
from shop import shop

from postroom.testing import handler_request


@pytest.fixture
async def client() -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(shop())) as opened:
        yield opened


async def told(kind: str) -> list[dict]:
    """Return what events of a kind the shop has emitted, oldest first."""
    connection = await asyncpg.connect(os.environ["SHOP_DATABASE_URL"])
    query = "SELECT payload FROM postroom.outbox_events WHERE event_type = $1 ORDER BY position"
    rows = await connection.fetch(query, kind)
    await connection.close()
    return [json.loads(row["payload"]) for row in rows]


async def test_an_order_is_told(client: TestClient) -> None:
    answer = await client.post("/orders", json={"item": "tea", "cents": 450})
    assert answer.status == 201
    assert {**await answer.json(), "item": "tea", "cents": 450} in await told("order_placed")


async def test_an_order_that_the_database_refuses_is_not(client: TestClient) -> None:
    before = await told("order_placed")
    assert (await client.post("/orders", json={"item": "nothing", "cents": 0})).status == 500
    assert await told("order_placed") == before


async def test_a_payment_that_is_delivered_twice_is_booked_once(client: TestClient) -> None:
    order = (await (await client.post("/orders", json={"item": "tea", "cents": 450})).json())["order"]
    paid = handler_request({"order": order}, event="order_paid")
    answers = [await (await client.post("/paid", data=paid.body, headers=paid.headers)).json() for _ in range(2)]
    assert answers == [{"confirmed": order}] * 2
    assert (await told("order_confirmed")).count({"order": order}) == 1
