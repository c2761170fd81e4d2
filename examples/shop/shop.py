"""A shop with a Postgres of its own: an order and its event commit together, and a payment is booked once.

    createdb shop && psql shop -f schema.sql
    postroom outbox install --database postgresql:///shop --mesh demo
    SHOP_DATABASE_URL=postgresql:///shop python shop.py

`POST /orders` takes an order. `POST /paid` is for a consumer of `demo.event.order_paid.v1`; a worker that has the
database as one of its `[[sources]]` publishes what happened. test_shop.py has the shop's tests.
"""

import os
from collections.abc import AsyncIterator

import asyncpg
import msgspec
from aiohttp import web

from postroom.handler import HandlerRequest
from postroom.transaction import emit, inbox

POOL = web.AppKey("pool", asyncpg.Pool)


class Order(msgspec.Struct):
    """What somebody wants to buy."""

    item: str
    cents: int


async def place(request: web.Request) -> web.Response:
    """Take an order: it is kept, and will be told, or neither."""
    order = msgspec.json.decode(await request.read(), type=Order)
    async with request.app[POOL].acquire() as connection, connection.transaction():
        insert = "INSERT INTO orders (item, cents) VALUES ($1, $2) RETURNING id"
        number = await connection.fetchval(insert, order.item, order.cents)
        told = {"order": number, "item": order.item, "cents": order.cents}
        await emit(connection, "demo", "order_placed", told, aggregate_type="order", aggregate_id=number)
    return web.json_response({"order": number}, status=201)


async def paid(request: web.Request) -> web.Response:
    """Book a payment, however often it is delivered."""
    message = msgspec.json.decode(await request.read(), type=HandlerRequest)
    number = message.payload["order"]
    acquiring = request.app[POOL].acquire()
    async with acquiring as connection, connection.transaction(), inbox(connection, message) as claim:
        if claim.first:
            await connection.execute("UPDATE orders SET payments = payments + 1 WHERE id = $1", number)
            told = {"order": number}
            await emit(connection, "demo", "order_confirmed", told, aggregate_type="order", aggregate_id=number)
            claim.result = {"confirmed": number}
    return web.json_response(claim.result)


async def database(app: web.Application) -> AsyncIterator[None]:
    """Keep the pool for as long as the shop is open."""
    async with asyncpg.create_pool(os.environ["SHOP_DATABASE_URL"], min_size=1) as app[POOL]:
        yield


def shop() -> web.Application:
    """Build the application."""
    app = web.Application()
    app.cleanup_ctx.append(database)
    app.add_routes([web.post("/orders", place), web.post("/paid", paid)])
    return app


if __name__ == "__main__":
    web.run_app(shop(), host="127.0.0.1", port=int(os.environ.get("PORT", "8000")))
