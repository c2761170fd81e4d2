"""What a claim takes, in which order, and what it leaves alone."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.outboxes import START, WHY, Clock, accepted, opened, retry, send

from outbox import Outbox, reader, relay
from outbox.errors import outbox_full
from outbox.outbox import CLAIM_AT_ONCE

OpenOutbox = Callable[..., Awaitable[Outbox]]
HOUR = 3_600_000  # ms


async def ids(outbox: Outbox, **limits: object) -> list[str]:
    return [row.client_message_id for row in await outbox.claim(**limits)]  # type: ignore[arg-type]


async def test_rows_come_by_priority_then_age(outbox: Outbox) -> None:
    for number, priority in enumerate(["low", "next", "now", "next", "low", "now"]):
        await accepted(outbox, send(f"{priority}-{number}", priority=priority))
    assert await ids(outbox) == ["now-2", "now-5", "next-1", "next-3", "low-0", "low-4"]


async def test_a_claimed_row_carries_what_the_broker_needs(outbox: Outbox) -> None:
    asked = send("id-1", 'naïve "quotes" \\ \u2028 \U0001f4ee', to="dm:bob")
    (row,) = await accepted(outbox, asked)
    (claimed,) = await outbox.claim()
    assert claimed.row_id == row.row_id
    assert claimed.client_message_id == "id-1"
    assert claimed.fingerprint == asked.fingerprint
    assert claimed.payload == asked.payload
    assert (claimed.destination, claimed.attempts, claimed.age_from) == ("dm:bob", 0, START)


async def test_a_claimed_row_is_as_old_as_its_not_before_where_that_is_later(outbox: Outbox, clock: Clock) -> None:
    await accepted(outbox, send("past", not_before=START - 1000), send("later", not_before=START + 60_000))
    clock.forward(90)
    assert [(row.client_message_id, row.age_from) for row in await outbox.claim()] == [
        ("past", START),
        ("later", START + 60_000),
    ]


async def test_a_claimed_row_is_inflight_and_not_claimed_again(outbox: Outbox) -> None:
    await accepted(outbox, send())
    await outbox.claim()
    assert await outbox.claim() == []
    found = await outbox.row("id-1")
    assert found is not None
    assert found.status == "inflight"


async def test_the_limits_count_rows_and_bytes(outbox: Outbox) -> None:
    await accepted(outbox, *(send(f"id-{number}", "x" * 1000) for number in range(10)))
    size = len(send("id-0", "x" * 1000).payload)
    assert await ids(outbox, limit=2) == ["id-0", "id-1"]
    assert await ids(outbox, max_bytes=3 * size) == ["id-2", "id-3", "id-4"]
    assert await ids(outbox, max_bytes=3 * size - 1) == ["id-5", "id-6"]


async def test_a_large_claim_is_many_short_transactions_within_one_limit(outbox: Outbox) -> None:
    await accepted(outbox, *(send(f"id-{number:03}", "x" * 1000) for number in range(600)))
    size = len(send("id-000", "x" * 1000).payload)
    before = outbox.progress[0]
    assert await ids(outbox, limit=450) == [f"id-{number:03}" for number in range(450)]
    assert outbox.progress[0] - before == 5
    assert await ids(outbox, max_bytes=130 * size) == [f"id-{number:03}" for number in range(450, 580)]
    assert await ids(outbox) == [f"id-{number:03}" for number in range(580, 600)]


@pytest.mark.parametrize("beyond", [0, 1])
async def test_the_second_part_of_a_claim_stays_within_the_bytes_too(outbox: Outbox, beyond: int) -> None:
    await accepted(outbox, *(send(f"id-{number:03}", "x" * 1000) for number in range(300)))
    size = len(send("id-000", "x" * 1000).payload)
    assert len(await ids(outbox, max_bytes=CLAIM_AT_ONCE * size + beyond)) == CLAIM_AT_ONCE


async def test_what_a_claim_took_before_the_disk_was_full_is_not_forgotten(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    await accepted(outbox, *(send(f"id-{number:03}") for number in range(300)))
    submit = outbox._store.submit
    claims = iter([True, False])

    async def full() -> None:
        raise outbox_full(1)

    monkeypatch.setattr(outbox._store, "submit", lambda claim: submit(claim) if next(claims) else full())
    assert len(await ids(outbox)) == CLAIM_AT_ONCE


async def test_a_row_beyond_the_bytes_is_claimed_alone(outbox: Outbox) -> None:
    await accepted(outbox, send("large", "x" * 5000), send("small"))
    assert await ids(outbox, max_bytes=100) == ["large"]


async def test_excluded_destinations_are_left_alone(outbox: Outbox) -> None:
    await accepted(outbox, send("a", to="dm:a"), send("b", to="dm:b"), send("c", to="dm:c"))
    assert await ids(outbox, excluded={"dm:a", "dm:c"}) == ["b"]
    assert await ids(outbox, excluded={"dm:a", "dm:c"}) == []
    assert await ids(outbox) == ["a", "c"]


async def test_a_claim_walks_past_many_excluded_rows_a_stretch_at_a_time(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_SCAN", 10)
    await accepted(outbox, *(send(f"paused-{number}", to="dm:paused") for number in range(25)), send("open"))
    for found in ([], [], ["open"]):
        await asyncio.wait_for(outbox.wait_for_work(60), 30)
        assert await ids(outbox, excluded={"dm:paused"}) == found


async def test_a_row_that_comes_back_behind_the_walk_is_found(outbox: Outbox, clock: Clock) -> None:
    await accepted(outbox, send("first"))
    (first,) = await outbox.claim()
    await accepted(outbox, *(send(f"paused-{number}", to="dm:paused") for number in range(5)))
    assert await ids(outbox, excluded={"dm:paused"}) == []
    await outbox.settle([retry(first.row_id)])
    assert await ids(outbox, excluded={"dm:paused"}) == ["first"]
    await outbox.settle([retry(first.row_id, 1000)])
    assert await ids(outbox, excluded={"dm:paused"}) == []
    clock.forward(1)
    assert await ids(outbox, excluded={"dm:paused"}) == ["first"]


async def test_rows_that_were_found_but_not_taken_are_taken_by_the_next_claims(outbox: Outbox) -> None:
    await accepted(outbox, send("paused", to="topic:a"))
    await accepted(outbox, *(send(f"open-{number}", "x" * 1000, to="topic:b") for number in range(10)))
    size = len(send("open-0", "x" * 1000, to="topic:b").payload)
    claims = [await ids(outbox, excluded={"topic:a"}, max_bytes=4 * size) for _ in range(4)]
    assert [len(claim) for claim in claims] == [4, 4, 2, 0]


async def test_held_rows_are_left_alone_until_released(outbox: Outbox) -> None:
    (row,) = await accepted(outbox, send())
    await outbox.act("hold", row.row_id, **WHY)
    assert await ids(outbox) == []
    await outbox.act("release", row.row_id, **WHY)
    assert await ids(outbox) == ["id-1"]


async def test_a_row_that_waited_takes_its_place_by_age(outbox: Outbox, clock: Clock) -> None:
    await accepted(outbox, send("oldest", not_before=START + 5_000), send("older"), send("urgent", priority="now"))
    clock.forward(5)
    await accepted(outbox, send("young"))
    assert await ids(outbox) == ["urgent", "oldest", "older", "young"]


async def test_a_clock_that_is_set_back_does_not_hide_due_rows(outbox: Outbox, clock: Clock) -> None:
    await accepted(outbox, send())
    clock.forward(-3600)
    assert await ids(outbox) == ["id-1"]


@pytest.mark.parametrize("restarted", [False, True])
async def test_what_waits_by_a_clock_that_was_ahead_is_due_once_it_is_set_back(
    open_outbox: OpenOutbox, clock: Clock, *, restarted: bool
) -> None:
    outbox = await open_outbox()
    await accepted(outbox, send("tomorrow", not_before=START + 24 * HOUR), send("now"))
    (row,) = await outbox.claim()
    clock.forward(30 * 3600)  # past the sender's wish as well, which stands
    (later,) = await outbox.claim()
    await outbox.settle([retry(each.row_id, 60_000) for each in (row, later)])
    clock.forward(-30 * 3600)
    if restarted:
        await outbox.close()
        outbox = await open_outbox()
    assert await ids(outbox) == ["now"]
    clock.forward(24 * 3600)
    assert await ids(outbox) == ["tomorrow"]
    await outbox.close()


async def test_also_where_it_was_ahead_by_minutes(outbox: Outbox, clock: Clock) -> None:
    await accepted(outbox, send())
    clock.forward(30 * 60)
    (row,) = await outbox.claim()
    await outbox.settle([retry(row.row_id, 60_000)])
    assert await ids(outbox) == []
    clock.forward(-30 * 60)
    assert await ids(outbox) == ["id-1"]


async def test_where_nothing_was_left_and_nothing_came_no_claim_looks_again_for_a_second(
    outbox: Outbox, clock: Clock
) -> None:
    async def looks(claimed: list[str], **limits: object) -> bool:
        before = outbox.progress
        assert await ids(outbox, **limits) == claimed
        return outbox.progress != before

    await accepted(outbox, send("later", not_before=START + 500), send("a"), send("b"))
    assert await looks(["a"], limit=1)
    assert await looks(["b"])
    assert not await looks([])
    await accepted(outbox, send("paused", to="dm:paused"))
    assert await looks([], excluded={"dm:paused"})
    assert await looks(["paused"])
    assert not await looks([])
    clock.forward(0.5)
    assert await looks(["later"])
    assert not await looks([])
    clock.forward(1)
    assert await looks([])
    clock.forward(-1)
    assert await looks([])


async def test_nobody_waits_for_work_that_is_there(outbox: Outbox) -> None:
    await outbox.claim()
    await outbox.wait_for_work(0)
    waiting = asyncio.ensure_future(outbox.wait_for_work(600))
    await accepted(outbox, send())
    await asyncio.wait_for(waiting, 30)
    (row,) = await outbox.claim()
    waiting = asyncio.ensure_future(outbox.wait_for_work(600))
    await asyncio.sleep(0)
    await outbox.settle([retry(row.row_id)])
    await asyncio.wait_for(waiting, 30)


async def test_a_waiting_row_ends_the_wait_when_its_time_comes(outbox: Outbox, clock: Clock) -> None:
    await accepted(outbox, send(not_before=START + 3_600_000))
    await outbox.claim()
    await outbox.wait_for_work(0)
    clock.forward(3600)
    await asyncio.wait_for(outbox.wait_for_work(600), 30)
    assert await ids(outbox) == ["id-1"]


async def test_a_claim_reads_ranges_of_indexes_and_never_the_whole_table(outbox: Outbox, database: Path) -> None:
    await accepted(outbox, send())
    queries = relay._QUERIES
    values = {
        "lane": 1,
        "after": 0,
        "limit": 5,
        "scan": 5,
        "excluded": "[]",
        "now": 0,
        "before": 0,
        "own_after": "",
        "own_since": 0,
    }
    with opened(database) as db:
        for name in ("wake", "next_due", "candidates", "candidates_elsewhere", "scanned", "expired"):
            plan = [line[3] for line in db.execute(f"EXPLAIN QUERY PLAN {queries[name]}", values)]
            assert not [line for line in plan if line.startswith("SCAN outbox")], (name, plan)
            if name != "candidates_elsewhere":  # which sorts what it walked past, a bounded stretch
                assert not [line for line in plan if "TEMP B-TREE" in line], (name, plan)


async def test_what_is_inflight_is_found_without_a_look_at_all_rows(outbox: Outbox, database: Path) -> None:
    await accepted(outbox, send())
    queries = {**relay._QUERIES, **reader._QUERIES}
    with opened(database) as db:
        for name in ("due_since", "interrupted", "reclaim"):
            plan = [line[3] for line in db.execute(f"EXPLAIN QUERY PLAN {queries[name]}", {"now": 0})]
            assert [line for line in plan if "outbox_by_status (status=?)" in line], (name, plan)
