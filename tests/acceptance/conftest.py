"""What the acceptance tests share: a mail room on the session's servers, and the chain with all that follows it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest
from support.chain import Chain
from support.effects import Remembering
from support.handlers import CountingHandler, serving
from support.mailroom import Mailroom
from support.zygote import Zygote


@pytest.fixture
async def mailroom(short_directory: Path, database_url: str, redis_url: str, zygote: Zygote) -> AsyncIterator[Mailroom]:
    room = Mailroom(short_directory, database_url, redis_url, zygote=zygote)
    await room.open()
    yield room
    room.close()


@pytest.fixture
async def handler() -> AsyncIterator[CountingHandler]:
    async with serving(Remembering()) as running:
        yield running


@pytest.fixture
async def chain(
    short_directory: Path, database_url: str, redis_url: str, handler: CountingHandler, zygote: Zygote
) -> AsyncIterator[Chain]:
    chain = Chain(short_directory, database_url, redis_url, handler.url, zygote=zygote)
    try:
        await chain.open()
        yield chain
    finally:
        chain.close()


@pytest.fixture
def accepted(database_url: str) -> Callable[[], Awaitable[dict[str, bytes]]]:
    """Read the bodies that Postgres holds, by id; fails where an id stands twice."""

    async def read() -> dict[str, bytes]:
        database = await asyncpg.connect(database_url)
        rows = await database.fetch(
            "SELECT client_message_id, body FROM mesh.topic_message "
            "JOIN mesh.client_message_dedupe USING (broker_message_id, client_message_id)"
        )
        messages = await database.fetchval("SELECT count(*) FROM mesh.topic_message")
        await database.close()
        held = {row["client_message_id"]: row["body"] for row in rows}
        assert len(held) == len(rows) == messages
        return held

    return read
