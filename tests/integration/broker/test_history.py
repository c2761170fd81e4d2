"""Reading the history: in the order of the commits, page by page, bounded (docs/contract/accept.md#accept-5)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from broker import history

Message = Callable[..., dict[str, Any]]


async def read_all(caller: Any, **query: Any) -> list[list[int]]:
    """Follow `next_after` to the end; the history_ids of each page."""
    pages, after = [], 0
    while after is not None:
        page = (await caller.get("/v1/history", after=after, **query)).body
        pages.append([entry["history_id"] for entry in page["messages"]])
        after = page.get("next_after")
    return pages


async def test_pages_continue_where_the_last_one_ended(broker: Any, message: Message) -> None:
    alice = broker.member("alice")
    await alice.send(*(message(f"id-{n}") for n in range(5)))

    assert await read_all(alice, limit=2) == [[1, 2], [3, 4], [5]]
    assert await read_all(alice) == [[1, 2, 3, 4, 5]]
    end = (await alice.get("/v1/history", after=5)).body
    assert (end["messages"], "next_after" in end) == ([], False)


async def test_a_page_can_be_of_one_destination(broker: Any, message: Message) -> None:
    alice = broker.member("alice")
    await alice.send(message("a"), message("b", "dm:bob"), message("c", "queue:work"), message("d", "dm:bob"))

    assert await read_all(alice, destination="dm:bob") == [[2, 4]]
    assert (await alice.get("/v1/history", destination="dm:")).code == "invalid_destination"


async def test_a_reader_passes_over_a_long_stretch_that_is_not_for_it(
    broker: Any, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "LOOK_AT", 4)
    await broker.member("alice").send(*(message(f"id-{n}", "dm:ada") for n in range(9)), message("last", "dm:bob"))

    assert await read_all(broker.member("bob")) == [[], [], [10]]


async def test_a_page_holds_as_many_bytes_as_fit_and_one_message_at_least(
    broker: Any, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MAX_PAGE_BYTES", 10)
    alice = broker.member("alice")
    await alice.send(*(message(f"id-{n}", body="x" * size) for n, size in enumerate((100, 4, 4, 4, 4))))

    assert await read_all(alice) == [[1], [2, 3, 4], [5]]

    await alice.send(*(message(f"meta-{n}", body="", meta={"a": value}) for n, value in enumerate(("x" * 100, 1, 2))))
    assert (await read_all(alice))[2:] == [[5, 6], [7, 8]]


async def test_a_page_of_many_small_values_is_made_a_slice_at_a_time(
    broker: Any, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_ROWS_AT_ONCE", 50)
    monkeypatch.setattr("broker.shares._SLICE_SECONDS", 0.0)
    alice = broker.member("alice")
    await alice.send(*(message(f"id-{n}", meta={"a": [[]] * 400}) for n in range(50)))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    make, made_in = history.history_message, set()
    monkeypatch.setattr(history, "history_message", lambda row: made_in.add(turns) or make(row))
    counting = asyncio.create_task(count())
    assert await read_all(alice) == [list(range(1, 51))]
    counting.cancel()
    assert len(made_in) > 40


async def test_a_reader_never_skips_a_message_that_commits_late(
    broker: Any, message: Message, postgres: Any, waiting_for_lock: Callable[[int], Awaitable[None]]
) -> None:
    """A batch that is about to commit holds the counter, so no later number can be read before it."""
    alice, bob = broker.member("alice"), broker.member("bob")
    await postgres.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.client_message_id = 'late' THEN PERFORM pg_advisory_xact_lock(7); END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER w AFTER INSERT ON mesh.message_history FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    try:
        await postgres.execute("SELECT pg_advisory_lock(7)")
        late = asyncio.create_task(alice.send_one(message("late")))
        await waiting_for_lock(1)
        early = asyncio.create_task(bob.send_one(message("early")))
        await waiting_for_lock(2)
        assert await read_all(alice) == [[]]
        await postgres.execute("SELECT pg_advisory_unlock(7)")
        assert ((await late).history_id, (await early).history_id) == (1, 2)
    finally:
        await postgres.execute("DROP FUNCTION wait CASCADE")


async def test_a_bad_query_is_refused(broker: Any) -> None:
    queries = [
        {"limit": "0"},
        {"limit": "1001"},
        {"after": "-1"},
        {"after": "x"},
        {"after": str(2**63)},
        {"afterr": "1"},
    ]

    for query in queries:
        assert (await broker.member("alice").get("/v1/history", **query)).code == "invalid_query", query


async def test_a_message_is_found_by_its_id_and_only_by_its_id(broker: Any, message: Message) -> None:
    alice = broker.member("alice")
    item = message("id-1", priority="now", reply_to="other-id")
    sent = await alice.send_one(item)
    found = (await alice.get(f"/v1/messages/{sent.broker_message_id}")).body

    assert (found["client_message_id"], found["to"], found["sender"]) == ("id-1", "topic:orders", "alice")
    assert (found["priority"], found["reply_to"]) == ("now", "other-id")
    assert found["request_fingerprint"] == item["request_fingerprint"]
    for nonsense in ("x", "00000000-0000-0000-0000-000000000000", "%27", "id-1"):
        assert (await alice.get(f"/v1/messages/{nonsense}")).code == "message_not_found"
