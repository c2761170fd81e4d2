"""A shop in FastAPI and Postgres: an order and its event commit together, or neither does.

    pip install fastapi uvicorn 'postroom[postgres]'
    export SHOP_DATABASE_URL=$POSTROOM_DATABASE_URL SHOP_SECRET=…      # beside `postroom up`
    uvicorn shop:app

The tables are in a schema of their own in the broker's database, whose outbox any transaction may put events into; a
worker publishes them. What comes back, a consumer posts to `/payments`, as often as it takes: the key of the message is
stored in the transaction of the payment.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import asyncpg
import msgspec
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from pydantic import BaseModel

from postroom import AsyncClient, NotPermitted
from postroom.handler import HandlerRequest
from postroom.signatures import SIGNATURE, verify

SECRET = os.environ.get("SHOP_SECRET", "a secret of both sides").encode()
TABLES = """
CREATE SCHEMA IF NOT EXISTS shop;
CREATE TABLE IF NOT EXISTS shop.orders (number int PRIMARY KEY, total int NOT NULL, paid int NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS shop.handled (message text PRIMARY KEY);
"""
PLACE = "INSERT INTO shop.orders (number, total) VALUES ($1, $2)"
ANNOUNCE = "SELECT postroom.emit('demo', 'order', $1, 'order_placed', $2)"
HANDLE = "INSERT INTO shop.handled VALUES ($1) ON CONFLICT DO NOTHING RETURNING message"
PAY = "UPDATE shop.orders SET paid = paid + $1 WHERE number = $2"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Hold the connections of this process."""
    async with asyncpg.create_pool(os.environ["SHOP_DATABASE_URL"], min_size=1) as app.state.pool:
        await app.state.pool.execute(TABLES)
        yield


app = FastAPI(lifespan=lifespan)


class Order(BaseModel):
    """What a customer orders."""

    number: int
    total: int


async def transaction(request: Request) -> AsyncIterator[Any]:
    """Lend a connection in a transaction, which commits before the answer, and only where the request succeeds."""
    async with request.app.state.pool.acquire() as connection, connection.transaction():
        yield connection


async def post() -> AsyncIterator[AsyncClient]:
    """Lend a client of the daemon; a test puts a fake in its place."""
    async with AsyncClient() as client:
        yield client


Transaction = Annotated[Any, Depends(transaction, scope="function")]
Post = Annotated[AsyncClient, Depends(post)]


@app.post("/orders", status_code=201)
async def place(order: Order, connection: Transaction) -> Order:
    """Store an order and announce it: both or neither."""
    await connection.execute(PLACE, order.number, order.total)
    await connection.execute(ANNOUNCE, str(order.number), order.model_dump_json())
    if order.total < 0:
        raise HTTPException(422, "an order cannot cost less than nothing")
    return order


@app.post("/orders/{number}/reminder", status_code=202)
async def remind(number: int, client: Post) -> None:
    """Have the customer reminded tomorrow, once however often this is asked for."""
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    at = datetime(tomorrow.year, tomorrow.month, tomorrow.day, 9, tzinfo=UTC)
    await client.send("queue:reminders", {"order": number}, client_message_id=f"remind-{number}", not_before=at)


@app.post("/payments")
async def pay(request: Request, connection: Transaction) -> Response:
    """Take the money of an `order_paid`, once: 409 where it was taken before."""
    body = await request.body()
    try:
        verify(SECRET, body, request.headers.get(SIGNATURE))
    except NotPermitted as error:
        raise HTTPException(401, str(error)) from error
    message = msgspec.json.decode(body, type=HandlerRequest)
    if await connection.fetchval(HANDLE, message.message_id) is None:
        return Response(status_code=409)
    await connection.execute(PAY, message.payload["paid"], message.payload["number"])
    return Response(status_code=200)
