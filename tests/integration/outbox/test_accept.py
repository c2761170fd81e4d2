"""Accepting sends: the accept table (docs/contract/send.md#send-37) at the level of rows, alone and in groups."""

import asyncio
from pathlib import Path

import pytest
from support.outboxes import ALICE, START, Clock, accepted, counted, row_in, send

from outbox import AcceptedRow, Caller, Outbox

STATES = ["pending", "inflight", "done", "dead", "aborted"]


async def test_a_free_id_gets_a_pending_row(outbox: Outbox) -> None:
    (row,) = await accepted(outbox, send())
    assert row == AcceptedRow(
        inserted=True,
        row_id=row.row_id,
        status="pending",
        fingerprint=send().fingerprint,
        destination="topic:orders",
        enqueued_at=START,
        submitted_uid=1000,
    )
    found = await outbox.row("id-1")
    assert found is not None
    assert (found.id, found.status, found.submitted_by, found.attempts) == (row.row_id, "pending", "1000:1000", 0)


@pytest.mark.parametrize("body", ["hello", "something else"], ids=["match", "mismatch"])
@pytest.mark.parametrize("status", STATES)
async def test_a_used_id_gets_its_row_and_changes_nothing(outbox: Outbox, clock: Clock, status: str, body: str) -> None:
    row_id = await row_in(outbox, status)
    before = await outbox.row("id-1")
    clock.forward(5)
    (row,) = await accepted(outbox, send(body=body), caller=Caller(2000, 2000))
    assert (row.inserted, row.row_id, row.status) == (False, row_id, status)
    assert row.fingerprint == send().fingerprint
    assert (row.fingerprint == send(body=body).fingerprint) == (body == "hello")
    assert (row.enqueued_at, row.submitted_uid, row.destination) == (START, 1000, "topic:orders")
    assert (row.broker_message_id, row.history_id) == (("BROKER-1", 7) if status == "done" else (None, None))
    assert row.last_error == ("topic_not_found: there is no topic orders" if status == "dead" else None)
    assert await outbox.row("id-1") == before


async def test_one_id_twice_in_one_batch_is_answered_as_one_after_the_other(outbox: Outbox) -> None:
    first, other, again, mismatch = await accepted(outbox, send(), send("id-2"), send(), send(body="else"))
    assert [first.inserted, other.inserted, again.inserted, mismatch.inserted] == [True, True, False, False]
    assert first.row_id == again.row_id == mismatch.row_id
    assert mismatch.fingerprint == send().fingerprint != send(body="else").fingerprint
    assert (await outbox.counts()).rows["pending"] == 2


async def test_of_32_callers_with_one_id_exactly_one_writes_it(outbox: Outbox, database: Path) -> None:
    bodies = ["hello" if number % 2 else "else" for number in range(32)]
    rows = await asyncio.gather(*(accepted(outbox, send(body=body)) for body in bodies))
    assert sum(row.inserted for (row,) in rows) == 1
    assert {row.fingerprint for (row,) in rows} == {send(body=bodies[0]).fingerprint}
    assert counted(database)["pending"] == 1


async def test_a_batch_beyond_one_statement_is_written_whole_and_in_order(outbox: Outbox) -> None:
    sends = [send(f"id-{number:04d}") for number in range(777)]
    rows = await accepted(outbox, *sends, sends[5], send("one more"))
    assert [row.inserted for row in rows] == [True] * 777 + [False, True]
    assert rows[777].row_id == rows[5].row_id
    claimed = await outbox.claim(limit=1000)
    assert [row.client_message_id for row in claimed] == [each.client_message_id for each in sends] + ["one more"]


async def test_concurrent_sends_share_a_transaction(outbox: Outbox) -> None:
    transactions, _ = outbox.progress
    await asyncio.gather(*(accepted(outbox, send(f"id-{number}")) for number in range(100)))
    assert outbox.progress[0] - transactions <= 2


async def test_not_before_makes_a_row_due_then(outbox: Outbox, clock: Clock) -> None:
    await accepted(outbox, send(not_before=START + 60_000))
    assert await outbox.claim() == []
    clock.forward(60)
    assert [row.client_message_id for row in await outbox.claim()] == ["id-1"]


async def test_not_before_in_the_past_makes_a_row_due_now(outbox: Outbox) -> None:
    await accepted(outbox, send(not_before=START - 60_000))
    assert len(await outbox.claim()) == 1


async def test_a_caller_that_goes_away_loses_nothing(outbox: Outbox) -> None:
    gone = asyncio.ensure_future(outbox.accept([send()], ALICE))
    await asyncio.sleep(0)
    gone.cancel()
    (row,) = await accepted(outbox, send())
    assert not row.inserted


async def test_no_sends_get_no_answers(outbox: Outbox) -> None:
    assert await outbox.accept([], ALICE) == []
