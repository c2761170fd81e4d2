"""Reading the history: in the order of its numbers, page by page, bounded (docs/contract/accept.md#accept-5)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import product
from typing import Any

import pytest

from broker import history
from broker.retention import step

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
    for path, malformed in product(("/v1/history", "/v1/messages"), ("dm:", "")):
        refused = await alice.get(path, destination=malformed)
        assert (refused.code, refused.body["field"]) == ("invalid_destination", "destination")


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


@pytest.fixture
async def late(
    broker: Any, message: Message, postgres: Any, waiting_for_lock: Callable[[int], Awaitable[None]]
) -> AsyncIterator[asyncio.Task[Any]]:
    """A post that has its number, 2, and stands before its commit; `pg_advisory_unlock(7)` lets it go."""
    await postgres.execute(
        "CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN IF NEW.client_message_id = 'late' THEN PERFORM pg_advisory_xact_lock(7); END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER w AFTER INSERT ON mesh.message_history FOR EACH ROW EXECUTE FUNCTION wait()"
    )
    await broker.member("alice").send_one(message("first"))
    await postgres.execute("SELECT pg_advisory_lock(7)")
    post = asyncio.create_task(broker.member("alice").send_one(message("late")))
    await waiting_for_lock(1)
    yield post
    await postgres.execute("SELECT pg_advisory_unlock_all()")
    await post
    await postgres.execute("DROP FUNCTION wait CASCADE")


async def test_a_reader_never_skips_a_message_that_commits_late(
    broker: Any, message: Message, postgres: Any, late: asyncio.Task[Any]
) -> None:
    """It reads what is before, and waits for what may still come."""
    bob = broker.member("bob")
    assert (await bob.send_one(message("early"))).history_id == 3
    page = (await bob.get("/v1/history")).body
    assert ([entry["history_id"] for entry in page["messages"]], page["next_after"]) == ([1], 1)
    reading = asyncio.create_task(read_all(bob))
    await asyncio.wait([reading], timeout=0.1)
    assert not reading.done()
    await postgres.execute("SELECT pg_advisory_unlock(7)")
    assert await reading == [[1], [2, 3]]
    assert (await late).history_id == 2


async def test_a_page_says_up_to_which_number_retention_has_deleted_messages(
    broker: Any, message: Message, tamper: Callable[[str], Awaitable[None]], postgres: Any
) -> None:
    """A reader whose number is lower may have missed some; it cannot see that from the numbers, which may have gaps."""
    alice = broker.member("alice")
    await alice.send(*(message(f"id-{n}") for n in range(5)))
    assert "deleted_to" not in (await alice.get("/v1/history")).body
    await tamper("UPDATE mesh.message_history SET expires_at = accepted_at + interval '1 us' WHERE history_id < 4")
    assert await step(postgres, 100, None) == (3, 0)

    for after, left in ((0, [4, 5]), (2, [4, 5]), (4, [5]), (5, [])):
        page = (await alice.get("/v1/history", after=after)).body
        assert ([each["history_id"] for each in page["messages"]], page["deleted_to"]) == (left, 3)


async def test_an_accept_that_was_rolled_back_leaves_a_gap(
    broker: Any, message: Message, postgres: Any, late: asyncio.Task[Any]
) -> None:
    assert (await broker.member("bob").send_one(message("early"))).history_id == 3
    await postgres.execute("SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'advisory'")
    assert (await late).status == 503
    assert await read_all(broker.member("bob")) == [[1, 3]]
    assert (await broker.member("bob").send_one(message("next"))).history_id == 4


@pytest.mark.usefixtures("late")
async def test_a_reader_does_not_wait_for_ever_and_not_for_another_mesh(
    broker: Any, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "_WAIT_SECONDS", 0.05)
    await broker.add_mesh("sea")
    bob, sailor = broker.member("bob"), broker.member("alice", "sea")
    assert (await bob.get("/v1/history", after=1)).body["messages"] == []  # nothing is behind it
    await bob.send_one(message("early"))
    answer = await bob.get("/v1/history", after=1)
    assert (answer.status, answer.code, answer.body["retryable"]) == (503, "posts_at_work", True)
    await sailor.send_one(message("early"))
    assert await read_all(sailor) == [[1]]


async def test_one_who_reads_while_two_brokers_accept_sees_each_message_once_and_in_order(
    broker: Any, message: Message, postgres: Any, start_broker: Any
) -> None:
    posts, seen = 40, []
    await postgres.execute(
        "CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN PERFORM pg_sleep(random() / 50); RETURN NULL; END $$;"
        "CREATE CONSTRAINT TRIGGER d AFTER INSERT ON mesh.message_history "
        "DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION dawdle()"
    )
    try:
        async with start_broker(broker.services.config) as other, asyncio.TaskGroup() as writing:
            for number in range(posts):
                sender = broker.member(("alice", "bob")[number % 2]).at((broker, other)[number // 2 % 2].url)
                writing.create_task(sender.send(message(f"{number}-a"), message(f"{number}-b", "topic:nothing")))
            while len(seen) < posts:
                page = (await broker.member("ada").get("/v1/history", after=max(seen, default=0), limit=7)).body
                seen += [entry["history_id"] for entry in page["messages"]]
    finally:
        await postgres.execute("DROP FUNCTION dawdle CASCADE")
    rows = await postgres.fetch("SELECT history_id, age(xmin) AS age FROM mesh.message_history ORDER BY history_id")
    assert seen == [row["history_id"] for row in rows]
    ages = [row["age"] for row in rows]
    assert ages == sorted(ages, reverse=True)  # lower numbers are those of older transactions


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


async def test_the_latest_messages_are_found_by_sender_destination_and_time(broker: Any, message: Message) -> None:
    alice, bob, ada = (broker.member(name) for name in ("alice", "bob", "ada"))
    await alice.send(message("a"), message("b", "dm:bob"), message("c", "queue:work"))
    await bob.send(message("d", "dm:alice"), message("e"))

    async def find(caller: Any = ada, **query: Any) -> list[str]:
        """Follow `next_cursor` to the end, two a page."""
        found, cursor = [], {}
        while cursor is not None:
            page = (await caller.get("/v1/messages", limit=2, **query, **cursor)).body
            found += [line["client_message_id"] for line in page["messages"]]
            cursor = {"cursor": page["next_cursor"]} if "next_cursor" in page else None
        return found

    assert await find() == ["e", "d", "c", "b", "a"]
    assert await find(sender="alice", destination="dm:bob") == ["b"]
    assert await find(sender="nobody") == []
    assert await find(bob) == ["e", "d", "b", "a"]  # it does not work at the queue
    assert await find(broker.admin, mesh="demo", destination="topic:orders") == ["e", "a"]
    (line,) = (await alice.get("/v1/messages", destination="queue:work")).body["messages"]
    assert (line["to"], line["sender"], line["history_id"], "body" in line) == ("queue:work", "alice", 3, False)
    assert set(await find(since=line["accepted_at"])) >= {"c", "d", "e"}
    assert not {"c", "d", "e"} & set(await find(until=line["accepted_at"]))
    for cursor in ("soon", "2026-01-31", f"2026-01-31T12:00:00Z/{2**63}"):
        assert (await alice.get("/v1/messages", cursor=cursor)).code == "invalid_cursor"


async def test_looking_for_a_rare_message_goes_on_from_page_to_page(
    broker: Any, message: Message, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "LOOK_AT", 4)
    await broker.member("alice").send(message("rare", "dm:bob"), *(message(f"id-{n}") for n in range(5)))

    first = (await broker.member("ada").get("/v1/messages", destination="dm:bob")).body
    assert first["messages"] == []
    (line,) = (await broker.member("ada").get("/v1/messages", cursor=first["next_cursor"])).body["messages"][-1:]
    assert line["client_message_id"] == "rare"


@pytest.mark.parametrize("moment", ["9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "3600", "-0.5"])
async def test_a_time_outside_the_calendar_or_a_number_is_refused(broker: Any, moment: str) -> None:
    for path, name in (("/v1/messages", "since"), ("/v1/messages", "until"), ("/v1/operator_log", "since")):
        answer = await broker.admin.get(path, mesh="demo", **{name: moment})
        assert (answer.status, answer.code, answer.body["field"]) == (400, "invalid_query", name)


async def test_a_time_at_the_end_of_the_calendar_is_a_time(broker: Any) -> None:
    for moment in ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z"):
        for path in ("/v1/messages", "/v1/operator_log"):
            assert (await broker.admin.get(path, mesh="demo", since=moment)).status == 200
