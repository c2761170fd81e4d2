"""An event that can never be published is seen, and dropped by an operator: recorded, and nothing waits for it."""

from __future__ import annotations

import json
from typing import Any

from postroom.delivery.publication.postgres import EVENTS, drop_failing, list_dropped, list_failing


async def drain(office: Any) -> None:
    publisher = office.publisher()
    while await publisher.step():
        pass
    await publisher.stop()


async def test_what_is_too_large_is_listed_dropped_and_kept_and_what_waited_behind_it_goes(office: Any) -> None:
    await office.add_stream()
    large = await office.emit("a", payload=json.dumps({"text": "x" * 8_400_000}))
    behind = [await office.emit("a"), await office.emit("a")]
    fine = await office.emit("b")
    await drain(office)
    (failing,) = (await list_failing(office.pool, EVENTS, office.context)).failing
    assert (failing.id, failing.aggregate, failing.behind) == (large, "a", 2)
    assert "raise its max_payload" in failing.error
    assert (await list_failing(office.pool, EVENTS, "another")).failing == []

    async with office.pool.acquire() as connection, connection.transaction():
        await drop_failing(connection, EVENTS, [large], actor="olga", reason="nobody can read it")
    assert (await list_failing(office.pool, EVENTS)).failing == []
    (dropped,) = await list_dropped(office.pool, EVENTS)
    assert (dropped.id, dropped.dropped_by, dropped.reason, dropped.error) == (
        large, "olga", "nobody can read it", failing.error,
    )  # fmt: skip
    size = await office.pool.fetchval("SELECT length(payload ->> 'text') FROM postroom.dropped_events")
    assert size == 8_400_000
    await drain(office)
    assert await office.ids() == [fine, *behind]


async def test_one_that_was_published_meanwhile_is_left_out_of_what_is_dropped(office: Any) -> None:
    await office.add_stream()
    poison = await office.pool.fetchval("SELECT postroom.emit('nobody', 'order', 'a', 'lost', '{}')::text")
    waiting = await office.emit("a")
    await drain(office)
    async with office.pool.acquire() as connection, connection.transaction():
        dropped = await drop_failing(connection, EVENTS, [poison, waiting], actor="olga", reason="a test")
    assert dropped == [poison]
    assert (await list_failing(office.pool, EVENTS)).failing == []
    assert [one.id for one in await list_dropped(office.pool, EVENTS)] == [poison]
