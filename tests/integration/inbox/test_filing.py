"""What is filed is here once, in order, and stays until retention takes it."""

import asyncio
import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from support.inboxes import message
from support.outboxes import START, Clock, opened

from inbox import _READ, _WRITE, Inbox, MessageFilter
from postroom._wire.sends import InboxMessage
from postroom.errors import InvalidMessage, TryAgain

DAY = 86_400
EVERYTHING = MessageFilter()


async def bodies(inbox: Inbox, wanted: MessageFilter = EVERYTHING, since: int | None = None) -> list[str | None]:
    page = await inbox.page(None, since, 1000, wanted)
    return [msgspec.json.decode(stored.message)["body"] for stored in page.messages]


async def test_a_message_is_here_once_however_often_it_is_filed(inbox: Inbox) -> None:
    assert await inbox.file([message(1), message(2)]) == 2
    assert await inbox.file([message(2), message(3), message(3)]) == 1
    assert await bodies(inbox) == ["message 1", "message 2", "message 3"]


async def test_the_same_id_of_another_sender_is_another_message(inbox: Inbox) -> None:
    await inbox.file([message(1), message(2, client_message_id="id-1", sender="carol")])
    assert len(await bodies(inbox)) == 2


async def test_a_stored_message_is_read_as_it_was_received(inbox: Inbox, clock: Clock) -> None:
    sent = message(7, body="zwölf\nBoxkämpfer", meta={"a": [1, {"b": None}]})
    await inbox.file([sent])
    (stored,) = (await inbox.page(None, None, 10)).messages
    assert b"\n" not in stored.encoded()
    read = msgspec.json.decode(stored.encoded(), type=InboxMessage)
    assert read.position == stored.position > START
    assert round(read.received_at.timestamp() * 1000) == clock.now
    assert {name: getattr(read, name) for name in sent.__struct_fields__} == msgspec.structs.asdict(sent)


async def test_batches_that_are_filed_at_once_all_arrive(inbox: Inbox) -> None:
    await asyncio.gather(*(inbox.file([message(number), message(number + 1)]) for number in range(1, 200, 2)))
    assert sorted(await bodies(inbox)) == sorted(f"message {number}" for number in range(1, 201))


async def test_a_batch_that_cannot_be_written_fails_alone(inbox: Inbox) -> None:
    wrong = message(1, sender=None)
    outcomes = await asyncio.gather(
        inbox.file([wrong]), inbox.file([message(2)]), inbox.file([message(3), wrong]), return_exceptions=True
    )
    assert [isinstance(outcome, TryAgain) for outcome in outcomes] == [True, False, True]
    assert await bodies(inbox) == ["message 2"]
    assert not inbox.failed.is_set()


async def test_pages_follow_one_another_to_the_end(inbox: Inbox) -> None:
    await inbox.file([message(number) for number in range(1, 26)])
    seen: list[int] = []
    cursor = None
    for expected in (10, 10, 5):
        page = await inbox.page(cursor, None, 10)
        assert len(page.messages) == expected
        seen += [stored.position for stored in page.messages]
        cursor = None if page.next_after is None else str(page.next_after)
    assert cursor is None
    assert seen == sorted(set(seen))


async def test_a_page_of_large_messages_ends_early_and_the_next_goes_on(inbox: Inbox) -> None:
    await inbox.file([message(number, body="x" * 1_000_000) for number in range(1, 13)])
    first = await inbox.page(None, None, 100)
    assert 0 < len(first.messages) < 12
    second = await inbox.page(str(first.next_after), None, 100)
    assert len(first.messages) + len(second.messages) == 12
    assert second.next_after is None


async def test_a_list_is_filtered_by_sender_destination_and_time(inbox: Inbox, clock: Clock) -> None:
    await inbox.file([message(1), message(2, sender="carol"), message(3, to="topic:orders")])
    clock.forward(60)
    await inbox.file([message(4, sender="carol", to="topic:orders")])
    assert await bodies(inbox, MessageFilter(sender="carol")) == ["message 2", "message 4"]
    assert await bodies(inbox, MessageFilter(destination="topic:orders")) == ["message 3", "message 4"]
    assert await bodies(inbox, MessageFilter("carol", "topic:orders")) == ["message 4"]
    assert await bodies(inbox, since=START + 1) == ["message 4"]
    assert await bodies(inbox, since=clock.now + 1) == []


@pytest.mark.parametrize("cursor", ["", "-1", "1.5", "٣", "9" * 19, "x"])
async def test_a_cursor_that_no_page_gave_is_refused(inbox: Inbox, cursor: str) -> None:
    with pytest.raises(InvalidMessage) as refusal:
        await inbox.page(cursor, None, 10)
    assert refusal.value.code == "invalid_cursor"


async def test_retention_deletes_what_is_old_and_nothing_else(inbox: Inbox, clock: Clock) -> None:
    await inbox.file([message(number) for number in range(1, 2501)])
    *_, last = (await inbox.page(None, None, 2500)).messages
    clock.forward(DAY)
    await inbox.file([message(3000)])
    assert (await inbox.page(None, None, 1)).deleted_to is None
    assert await inbox.prune(clock.now) == 2500
    assert (await inbox.page(str(last.position - 1), None, 1)).deleted_to == last.position
    assert await bodies(inbox) == ["message 3000"]
    assert await inbox.prune(clock.now) == 0


async def test_where_a_time_begins_and_what_is_old_is_found_without_a_look_at_all_messages(
    inbox: Inbox, database: Path, clock: Clock
) -> None:
    many = 3000
    await inbox.file([message(number) for number in range(1, many + 1)])
    clock.now += DAY * 1000
    await inbox.file([message(many + 1)])
    with opened(database) as db:
        (first,) = db.execute("SELECT min(position) FROM inbox").fetchone()
        values = {"since": clock.now, "before": clock.now, "limit": 10, "last": first + 9}
        for name, queries in (("since", _READ), ("old", _WRITE), ("note_pruned", _WRITE), ("prune", _WRITE)):
            steps = 0

            def count() -> int:
                nonlocal steps
                steps += 1
                return 0

            db.set_progress_handler(count, 1)
            db.execute(queries[name], values).fetchall()
            db.set_progress_handler(None, 1)
            assert steps < many, (name, steps)


async def test_a_clock_that_is_behind_makes_nothing_old(inbox: Inbox, clock: Clock) -> None:
    clock.now -= 10 * 365 * DAY * 1000
    accepted_at = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
    await inbox.file([message(1, accepted_at=accepted_at)])
    (filed,) = (await inbox.page(None, None, 1)).messages
    assert filed.received_at == int(accepted_at.timestamp() * 1000)


async def test_what_retention_took_does_not_come_back(inbox: Inbox, clock: Clock) -> None:
    await inbox.file([message(1), message(5)])
    clock.forward(DAY)
    await inbox.prune(clock.now)
    assert await inbox.file([message(1), message(5), message(6)]) == 1
    assert await bodies(inbox) == ["message 6"]


async def test_positions_grow_although_everything_was_deleted(inbox: Inbox, clock: Clock) -> None:
    await inbox.file([message(1)])
    (first,) = (await inbox.page(None, None, 1)).messages
    clock.forward(DAY)
    await inbox.prune(clock.now)
    await inbox.file([message(2)])
    (second,) = (await inbox.page(None, None, 1)).messages
    assert second.position > first.position


async def test_what_was_received_cannot_be_changed(inbox: Inbox, database: Path) -> None:
    await inbox.file([message(1)])
    with opened(database) as db, pytest.raises(sqlite3.IntegrityError, match="frozen"):
        db.execute("UPDATE inbox SET sender = 'mallory'")


async def test_a_full_disk_writes_nothing_and_the_inbox_goes_on_when_space_is_back(inbox: Inbox) -> None:
    await inbox.file([message(1)])
    await inbox._store.run(lambda db: db.execute("PRAGMA max_page_count = 1"))
    with pytest.raises(TryAgain) as refusal:
        await inbox.file([message(2, body="x" * 100_000)])
    assert (refusal.value.problem.status, refusal.value.code) == (507, "disk_full")
    await inbox._store.run(lambda db: db.execute("PRAGMA max_page_count = 100000"))
    assert await inbox.file([message(2)]) == 1
    assert await bodies(inbox) == ["message 1", "message 2"]


async def test_a_closed_inbox_says_so(inbox: Inbox) -> None:
    await inbox.close()
    for call in (inbox.file([message(1)]), inbox.page(None, None, 1)):
        with pytest.raises(TryAgain) as refusal:
            await call
        assert refusal.value.code == "inbox_unavailable"
