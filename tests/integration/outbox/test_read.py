"""Looking at the outbox: find, list, page, export, inspect, count."""

from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.outboxes import START, WHY, Clock, accepted, counted, done, row_in, send

from outbox import Outbox, RowFilter, reader
from postroom._wire.sends import OutboxRow
from postroom.errors import InvalidMessage, NotFound


async def pages(outbox: Outbox, row_filter: RowFilter, limit: int) -> list[list[str]]:
    found: list[list[str]] = []
    cursor: str | None = None
    while True:
        page = await outbox.list_rows(row_filter, cursor, limit)
        found.append([row.client_message_id for row in page.rows])
        if (cursor := page.next_cursor) is None:
            return found


async def test_pages_hold_every_row_once_in_age_order(outbox: Outbox) -> None:
    names = [f"id-{number}" for number in range(7)]
    await accepted(outbox, *(send(name) for name in names))
    assert await pages(outbox, RowFilter(), 3) == [names[:3], names[3:6], names[6:]]
    assert await pages(outbox, RowFilter(status="pending"), 7) == [names, []]


async def test_pending_rows_of_all_priorities_come_in_age_order(outbox: Outbox) -> None:
    await accepted(
        outbox,
        send("a", priority="low"),
        send("b", priority="now"),
        send("c", not_before=START + 1000),
        send("d"),
        send("e"),
    )
    await outbox.act("hold", "d", **WHY)
    assert await pages(outbox, RowFilter(status="pending"), 2) == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize("status", ["inflight", "done", "dead", "aborted"])
async def test_rows_of_one_status_are_found_among_others(outbox: Outbox, status: str) -> None:
    for name in ("inflight", "done", "dead", "aborted"):
        await row_in(outbox, name, name)
    await accepted(outbox, send("pending"))
    assert await pages(outbox, RowFilter(status=status), 10) == [[status]]  # type: ignore[arg-type]


async def test_a_search_that_finds_little_for_long_goes_on_with_the_next_page(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_SCAN", 10)
    monkeypatch.setattr(reader, "_SCANS_PER_PAGE", 2)
    await accepted(outbox, *(send(f"id-{number}") for number in range(45)), send("needle", to="dm:bob"))
    assert await pages(outbox, RowFilter(destination="dm:bob"), 5) == [[], [], ["needle"]]


async def test_many_ids_are_listed_page_by_page(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_SCAN", 3)
    names = [f"id-{number}" for number in range(8)]
    rows = await accepted(outbox, *(send(name) for name in names))
    wanted = RowFilter(ids=[row.row_id for row in rows[:4]] + names[4:])
    assert [name for page in await pages(outbox, wanted, 2) for name in page] == names


async def test_age_counts_from_when_a_row_was_accepted(outbox: Outbox, clock: Clock) -> None:
    await accepted(outbox, send("old"))
    old = datetime.fromtimestamp(clock() / 1000, UTC)
    clock.forward(100)
    await accepted(outbox, send("young"))
    young = datetime.fromtimestamp(clock() / 1000, UTC)
    assert await pages(outbox, RowFilter(older_than_seconds=50), 9) == [["old"]]
    assert await pages(outbox, RowFilter(older_than_seconds=100), 9) == [[]]
    assert await pages(outbox, RowFilter(before=young), 9) == [["old"]]
    assert await pages(outbox, RowFilter(before=old), 9) == [[]]
    assert await pages(outbox, RowFilter(before=young, older_than_seconds=100), 9) == [[]]


@pytest.mark.parametrize("cursor", ["x", "", "-1", "1.5", "9" * 30, "'", "²"])
async def test_a_cursor_that_no_list_returned_is_refused(outbox: Outbox, cursor: str) -> None:
    with pytest.raises(InvalidMessage) as refusal:
        await outbox.list_rows(RowFilter(), cursor)
    assert refusal.value.code == "invalid_cursor"


async def test_the_pages_have_every_row_and_no_payload(outbox: Outbox) -> None:
    await accepted(outbox, *(send(f"id-{number}", "secret") for number in range(1100)))
    rows = [row async for page in outbox.pages(RowFilter()) for row in page.rows]
    assert [row.client_message_id for row in rows] == [f"id-{number}" for number in range(1100)]
    assert "secret" not in repr(rows)


async def test_a_page_takes_no_more_work_because_many_rows_follow_it(outbox: Outbox) -> None:
    work = 0

    def count() -> int:
        nonlocal work
        work += 1
        return 0

    async def work_of_a_page() -> int:
        nonlocal work
        work = 0
        page = await anext(outbox.pages(RowFilter(status="pending")))
        assert len(page.rows) == 500
        return work

    await outbox._store.read(lambda db: db.set_progress_handler(count, 100))
    await accepted(outbox, *(send(f"first-{number}") for number in range(500)))
    alone = await work_of_a_page()
    await accepted(outbox, *(send(f"more-{number}") for number in range(2500)))
    assert await work_of_a_page() < alone * 1.2


async def test_a_row_shows_everything_but_its_payload(outbox: Outbox, clock: Clock) -> None:
    row_id = await row_in(outbox, "inflight")
    clock.forward(1.5)
    await outbox.settle([done(row_id)])
    chain = await outbox.inspect("id-1")
    row = chain.row
    assert row == OutboxRow(
        id=row_id,
        client_message_id="id-1",
        status="done",
        destination="topic:orders",
        priority="next",
        enqueued_at=row.enqueued_at,
        attempts=1,
        next_attempt_at=row.enqueued_at,
        request_fingerprint=send().fingerprint[:8].hex(),
        payload_bytes=len(send().payload),
        delivered_at=row.delivered_at,
        broker_message_id="BROKER-1",
        history_id=7,
        submitted_by="1000:1000",
    )
    assert row.enqueued_at.timestamp() * 1000 == START
    assert (chain.chain, chain.log) == ([row], [])


async def test_inspecting_nothing_says_so(outbox: Outbox) -> None:
    with pytest.raises(NotFound, match="there is no outbox row 'nothing'"):
        await outbox.inspect("nothing")
    assert await outbox.find_all(["nothing"]) == []


async def test_the_kept_counters_are_the_counted_rows(outbox: Outbox, clock: Clock, database: Path) -> None:
    for status in ("done", "dead", "aborted", "inflight"):
        await row_in(outbox, status, status)
    clock.forward(1)
    await accepted(outbox, send("a"), send("b", priority="low"))
    counts = await outbox.counts()
    assert counts.rows == counted(database)
    assert counts.payload_bytes == 6 * len(send().payload) - 1
    assert counts.oldest_pending_at == clock.now
    assert counts.file_bytes > 0
    assert counts.wal_bytes > 0


async def test_an_empty_outbox_has_no_oldest_row(outbox: Outbox) -> None:
    counts = await outbox.counts()
    assert (counts.oldest_pending_at, counts.payload_bytes, sum(counts.rows.values())) == (None, 0, 0)
