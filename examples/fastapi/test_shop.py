"""The shop's tests: a real Postgres, a fake daemon, and the requests that a consumer would make."""

import asyncio
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
import shop
from fastapi.testclient import TestClient

from postroom.testing import FakeAsyncClient, handler_request
from postroom.testing.fixtures import Mailroom


@pytest.fixture
def post() -> Iterator[FakeAsyncClient]:
    fake = FakeAsyncClient()
    shop.app.dependency_overrides[shop.post] = lambda: fake
    yield fake
    shop.app.dependency_overrides.clear()


@pytest.fixture
def web(mailroom: Mailroom, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("SHOP_DATABASE_URL", mailroom.database_url)
    with TestClient(shop.app) as client:
        yield client
    ask(mailroom, "TRUNCATE shop.orders, shop.handled")
    ask(mailroom, "DELETE FROM postroom.outbox_events WHERE event_type = 'order_placed'")


def ask(mailroom: Mailroom, query: str) -> list[tuple[Any, ...]]:
    async def fetch() -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(mailroom.database_url)
        try:
            return [tuple(row) for row in await connection.fetch(query)]
        finally:
            await connection.close()

    return asyncio.run(fetch())


def orders(mailroom: Mailroom) -> list[tuple[Any, ...]]:
    return ask(mailroom, "SELECT number, total, paid FROM shop.orders")


def announced(mailroom: Mailroom) -> list[tuple[Any, ...]]:
    return ask(mailroom, "SELECT aggregate_id FROM postroom.outbox_events WHERE event_type = 'order_placed'")


def test_an_order_and_its_event_commit_together(web: TestClient, mailroom: Mailroom) -> None:
    assert web.post("/orders", json={"number": 17, "total": 42}).status_code == 201
    assert (orders(mailroom), announced(mailroom)) == ([(17, 42, 0)], [("17",)])


def test_an_order_that_is_refused_leaves_neither(web: TestClient, mailroom: Mailroom) -> None:
    assert web.post("/orders", json={"number": 17, "total": -1}).status_code == 422
    assert (orders(mailroom), announced(mailroom)) == ([], [])


def test_a_reminder_is_sent_once_however_often_it_is_asked_for(web: TestClient, post: FakeAsyncClient) -> None:
    for _ in range(2):
        web.post("/orders/17/reminder")
    (sent,) = post.sent
    assert (sent.to, sent.json(), sent.not_before is not None) == ("queue:reminders", {"order": 17}, True)


def test_a_payment_is_taken_once_however_often_it_is_posted(web: TestClient, mailroom: Mailroom) -> None:
    web.post("/orders", json={"number": 17, "total": 42})
    request = handler_request({"number": 17, "paid": 42}, event="order_paid", secret=shop.SECRET)
    answers = [web.post("/payments", content=request.body, headers=request.headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 409]
    assert orders(mailroom) == [(17, 42, 42)]


def test_a_payment_that_nobody_signed_is_refused(web: TestClient) -> None:
    for secret in (None, b"another secret"):
        request = handler_request({"number": 17, "paid": 42}, event="order_paid", secret=secret)
        assert web.post("/payments", content=request.body, headers=request.headers).status_code == 401
