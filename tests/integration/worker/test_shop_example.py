"""The example of a shop with its own database: run as a user does, killed, and no order is lost or told twice."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import asyncpg
import pytest
from support.applications import fetch
from support.databases import create, drop
from support.jetstream import messages_in
from support.mailroom import worker
from support.waiting import until_so

from broker.database import QUERIES, migrate
from cli.stack import choose_port
from embedded import EmbeddedNats, EmbeddedPostgres
from embedded.processes import tethered
from postroom.delivery.applications import install

SHOP = Path(__file__).parents[3] / "examples/shop"
QUICK = {"POSTROOM_WORKER_RECORD_CHECK_SECONDS": "0.2", "POSTROOM_WORKER_EVENTS_IDLE_SECONDS": "0.05"}


@pytest.fixture
async def shop_url(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    name = "example_shop"
    await create(postgres_server, name)
    url = postgres_server.url_of(name)
    connection = await asyncpg.connect(url)
    await connection.execute((SHOP / "schema.sql").read_text())
    await connection.close()
    await install(url, meshes=["demo"])
    yield url
    await drop(postgres_server, name)


@contextmanager
def open_shop(url: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = tethered([sys.executable, str(SHOP / "shop.py")])
    environment = {"PATH": os.environ["PATH"], "SHOP_DATABASE_URL": url, "PORT": str(port)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def order(session: aiohttp.ClientSession, port: int, cents: int) -> int | None:
    """Place an order; returns its number, or None where the shop did not take it or did not say."""
    try:
        async with session.post(f"http://127.0.0.1:{port}/orders", json={"item": "tea", "cents": cents}) as answer:
            return (await answer.json())["order"] if answer.status == 201 else None
    except (aiohttp.ClientError, ConnectionError):
        return None


async def test_its_own_tests_pass(shop_url: str) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "pythonpath=.", str(SHOP)],
        cwd=SHOP,
        env={**os.environ, "SHOP_DATABASE_URL": shop_url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


async def test_no_order_is_lost_or_told_twice_though_the_shop_and_its_worker_are_killed(
    shop_url: str, database_url: str, own_nats: EmbeddedNats, tmp_path: Path
) -> None:
    await migrate(database_url)
    await fetch(database_url, QUERIES["create_mesh"], "demo")
    port, config = choose_port(), tmp_path / "worker.toml"
    config.write_text(
        f'database_url = "{database_url}"\n[nats]\nurl = "{own_nats.url}"\n'
        f'[[sources]]\nname = "shop"\ndatabase_url = "{shop_url}"\n'
        f'[[consumers]]\ncontext = "demo"\nconsumer.stream = "DEMO_EVENTS"\nconsumer.durable = "shop"\n'
        f'consumer.filter_subjects = ["demo.event.order_paid.>"]\nconsumer.backoff.first_seconds = 0.05\n'
        f'handler.url = "http://127.0.0.1:{port}/paid"\n'
    )
    taken: list[int] = []
    async with aiohttp.ClientSession() as session:

        async def buy(process: subprocess.Popen[bytes], most: int) -> None:
            """Order until the shop is killed in the midst of it."""
            while len(taken) < most:
                if (number := await order(session, port, 450)) is not None:
                    taken.append(number)
                    assert await order(session, port, 0) is None  # and one that is rolled back
            buying = [asyncio.create_task(order(session, port, 450)) for _ in range(5)]
            await asyncio.sleep(0)
            process.kill()
            taken.extend(number for number in await asyncio.gather(*buying) if number is not None)

        for rounds in (1, 2, 3):
            with open_shop(shop_url, port) as process, worker("--config", str(config), **QUICK) as (running, _):
                await buy(process, 20 * rounds)
                running.kill()

        paid = (
            "SELECT postroom.emit('demo', 'payment', $1::text, 'order_paid', jsonb_build_object('order', $1::integer))"
        )
        with open_shop(shop_url, port), worker("--config", str(config), **QUICK):
            for number in taken:
                await fetch(database_url, paid.replace("$1::text", "'one'"), number)
            done = "SELECT count(*) FROM orders WHERE payments > 0"
            await until_so(lambda: _is(shop_url, done, len(taken)))
            waiting = "SELECT count(*) FROM postroom.outbox_events WHERE published_at IS NULL"
            await until_so(lambda: _is(shop_url, waiting, 0))

    told: dict[str, Counter[int]] = {"order_placed": Counter(), "order_confirmed": Counter()}
    for message in await messages_in(own_nats, "DEMO_EVENTS"):
        kind = message.subject.split(".")[2]
        if kind in told:
            told[kind][json.loads(message.data)["order"]] += 1
    kept = await fetch(shop_url, "SELECT array_agg(id ORDER BY id) FROM orders")
    assert set(taken) <= set(kept)
    assert told == {"order_placed": Counter(kept), "order_confirmed": Counter(taken)}
    assert await fetch(shop_url, "SELECT max(payments) FROM orders") == 1


async def _is(url: str, query: str, value: int) -> bool:
    return bool(await fetch(url, query) == value)
