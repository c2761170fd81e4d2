"""Commands that a transaction in the database emits: on the subject of their queue, and again under their own id."""

from __future__ import annotations

import asyncpg
import pytest

from postroom.chassis.postgres import migrate
from postroom.delivery import ROOM
from postroom.delivery.subjects import command_subject

EMIT = "SELECT postroom.emit_command($1, $2, '{\"n\": 1}')::text"
ROW = "SELECT subject, event_type, payload::text, published_at, epoch FROM postroom.outbox_events WHERE id = $1::uuid"
PUBLISH = (
    "UPDATE postroom.outbox_events SET published_at = now(), stream = 's', stream_created_at = now(), "
    "stream_sequence = 1 WHERE id = $1::uuid"
)


@pytest.fixture
async def connection(database_url: str):
    await migrate(database_url, ROOM)
    connection = await asyncpg.connect(database_url)
    yield connection
    await connection.close()


async def test_a_command_goes_to_the_subject_of_its_queue(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    for queue in ("work", "work.now", "shop.work.now", "shop.work.now.really", "a-b_c"):
        key = await connection.fetchval(EMIT, "sea", queue)
        row = await connection.fetchrow(ROW, key)
        assert tuple(row)[:3] == (command_subject("sea", queue), queue, '{"n": 1}')


async def test_names_that_make_no_subject_are_refused(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    for context, queue in (
        ("sea", "Work"),
        ("sea", "a.b.c.d.e"),
        ("sea", "a" * 65),
        ("cmd", "a"),
        ("S", "a"),
        ("sea", ""),
    ):
        with pytest.raises(asyncpg.CheckViolationError, match="INVALID_OUTBOX") as refused:
            await connection.execute(EMIT, context, queue)
        assert refused.value.constraint_name == "POL-047-001"


async def test_what_is_emitted_again_keeps_its_id_and_gets_the_next_epoch(
    connection: asyncpg.Connection[asyncpg.Record],
) -> None:
    key = await connection.fetchval(EMIT, "sea", "work")
    again = "SELECT postroom.emit_again($1::uuid)"
    assert await connection.fetchval(again, key)
    assert (await connection.fetchrow(ROW, key))["epoch"] == 0  # it is not published yet: once is enough

    await connection.execute(PUBLISH, key)
    assert await connection.fetchval(again, key)
    row = await connection.fetchrow(ROW, key)
    assert (row["published_at"], row["epoch"]) == (None, 1)
    await connection.execute("DELETE FROM postroom.outbox_events")
    assert not await connection.fetchval(again, key)
