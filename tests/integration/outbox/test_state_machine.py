"""The state machine, enforced by the database: every pair of states, the forbidden ones too."""

import sqlite3
from itertools import product
from pathlib import Path

import pytest
from support.outboxes import WHY, opened, row_in, send

from outbox import Outbox
from outbox.operations import why_not
from postroom.errors import Conflict

STATES = ["pending", "inflight", "done", "dead", "aborted"]
ALLOWED = {
    ("pending", "inflight"),  # claimed
    ("inflight", "done"),
    ("inflight", "dead"),
    ("inflight", "pending"),  # settled, or found after a crash
    ("pending", "dead"),  # older than max_age
    ("pending", "aborted"),
    ("dead", "aborted"),
    ("pending", "done"),  # before a requeue or an abort the broker turned out to have it
    ("dead", "done"),
    ("done", "pending"),  # the broker's database lost it
}
MOVE = """
UPDATE outbox
SET status = :status,
    lane = CASE :status WHEN 'pending' THEN 1 END,
    last_error = 'code: detail',
    delivered_at = CASE :status WHEN 'done' THEN 1 END,
    broker_message_id = CASE :status WHEN 'done' THEN 'B' END,
    aborted_at = CASE :status WHEN 'aborted' THEN 1 END,
    aborted_by = CASE :status WHEN 'aborted' THEN 'operator' END
"""


@pytest.mark.parametrize(("before", "after"), list(product(STATES, STATES)))
async def test_the_file_lets_a_row_go_where_the_table_says_and_nowhere_else(
    outbox: Outbox, database: Path, before: str, after: str
) -> None:
    await row_in(outbox, before)
    with opened(database) as db:
        if (before, after) == ("done", "pending"):  # only where the broker lost it
            with pytest.raises(sqlite3.IntegrityError, match="no such transition"):
                db.execute(MOVE, {"status": after})
            db.execute("INSERT INTO outbox_missing SELECT seq FROM outbox")
        if (before, after) in ALLOWED:
            db.execute(MOVE, {"status": after})
        else:
            with pytest.raises(sqlite3.IntegrityError, match="no such transition"):
                db.execute(MOVE, {"status": after})
        (status,) = db.execute("SELECT status FROM outbox").fetchone()
    assert status == (after if (before, after) in ALLOWED else before)


@pytest.mark.parametrize("column", ["lane", "delivered_at", "broker_message_id", "aborted_at", "superseded_by"])
@pytest.mark.parametrize("status", STATES)
async def test_a_row_has_what_its_state_has_and_nothing_else(
    outbox: Outbox, database: Path, status: str, column: str
) -> None:
    await row_in(outbox, status)
    with opened(database) as db:
        (value,) = db.execute(f"SELECT {column} FROM outbox").fetchone()  # noqa: S608 - a name of this test
        if status == "aborted" and column == "superseded_by":
            return  # may be there or not
        other = "NULL" if value is not None else "1"
        with pytest.raises(sqlite3.IntegrityError, match="state"):
            db.execute(f"UPDATE outbox SET {column} = {other}")  # noqa: S608 - the same


@pytest.mark.parametrize("status", ["lost", "", None])
async def test_there_is_no_sixth_state(outbox: Outbox, database: Path, status: str | None) -> None:
    await row_in(outbox, "pending")
    with opened(database) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute("UPDATE outbox SET status = ?", (status,))


@pytest.mark.parametrize("status", STATES)
async def test_a_row_is_never_deleted(outbox: Outbox, database: Path, status: str) -> None:
    await row_in(outbox, status)
    with opened(database) as db:
        with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
            db.execute("DELETE FROM outbox")
        db.execute("PRAGMA recursive_triggers = ON")  # as the writer has it
        with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
            db.execute(
                "INSERT OR REPLACE INTO outbox (id, client_message_id, request_fingerprint, enqueued_at, "
                "next_attempt_at, lane, priority, destination, submitted_by, payload_bytes) "
                "SELECT 'new', client_message_id, request_fingerprint, 1, 1, 1, 'next', 'dm:x', '', 0 FROM outbox"
            )
        for change in ("DELETE FROM outbox_payload", "REPLACE INTO outbox_payload SELECT seq, x'' FROM outbox"):
            with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
                db.execute(change)


@pytest.mark.parametrize(
    "column",
    ["id", "client_message_id", "request_fingerprint", "enqueued_at", "destination", "priority", "payload_bytes"],
)
async def test_what_was_accepted_is_frozen(outbox: Outbox, database: Path, column: str) -> None:
    await row_in(outbox, "pending")
    with opened(database) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute(f"UPDATE outbox SET {column} = {column} || 'x'")  # noqa: S608 - a name of this test


@pytest.mark.parametrize("status", STATES)
@pytest.mark.parametrize("change", ["payload = payload || 'x'", "payload = x''", "seq = seq + 1"])
async def test_a_payload_is_frozen_until_it_is_pruned(outbox: Outbox, database: Path, status: str, change: str) -> None:
    await row_in(outbox, status)
    with opened(database) as db, pytest.raises(sqlite3.IntegrityError, match="only changes by being pruned"):
        db.execute(f"UPDATE outbox_payload SET {change}")  # noqa: S608 - a change of this test


@pytest.mark.parametrize("status", ["pending", "inflight", "dead"])
async def test_what_waits_is_not_pruned_even_by_hand(outbox: Outbox, database: Path, status: str) -> None:
    await row_in(outbox, "done", "old")
    assert (await outbox.prune(2**62, **WHY))[0] == 1
    row_id = await row_in(outbox, status)
    with opened(database) as db:
        (seq,) = db.execute("SELECT seq FROM outbox WHERE id = ?", (row_id,)).fetchone()
        db.execute(
            "INSERT INTO outbox_settled (seq, id, client_message_id, request_fingerprint, common, attempts, "
            "enqueued_at, settled_after, pruned_after, broker_message_id, checksum) "
            "SELECT ?, id, client_message_id, ?, common, attempts, enqueued_at, settled_after, pruned_after, "
            "broker_message_id, 0 FROM outbox_settled",
            (seq, send().fingerprint),
        )
        with pytest.raises(sqlite3.IntegrityError, match="never deleted"):
            db.execute("DELETE FROM outbox")


async def test_no_row_is_written_without_its_payload(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "dead")
    copy = (
        "INSERT INTO outbox (id, client_message_id, request_fingerprint, enqueued_at, next_attempt_at, lane, priority, "
        "destination, submitted_by, payload_bytes) "
        "SELECT 'new', 'new', request_fingerprint, 1, 1, 1, 'next', 'dm:x', '', 0 FROM outbox WHERE id = ?"
    )
    with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
        await outbox._store.run(lambda db: db.execute(copy, (row_id,)))
    assert await outbox.find_all(["new"]) == []


async def test_the_operator_log_is_append_only(outbox: Outbox, database: Path) -> None:
    await outbox.act("abort", await row_in(outbox, "pending"), **WHY)
    with opened(database) as db:
        for change in ("UPDATE operator_log SET reason = 'another'", "DELETE FROM operator_log"):
            with pytest.raises(sqlite3.IntegrityError, match="append-only"):
                db.execute(change)


VERBS = {"requeue": {"pending", "dead"}, "abort": {"pending", "dead"}, "hold": {"pending"}, "flush": {"pending"}}


@pytest.mark.parametrize("status", STATES)
@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_is_refused_with_a_sentence_where_the_state_forbids_it(
    outbox: Outbox, verb: str, status: str
) -> None:
    row_id = await row_in(outbox, status)
    assert (why_not(verb, status, held=False) is None) == (status in VERBS[verb])  # type: ignore[arg-type]
    if status in VERBS[verb]:
        await outbox.act(verb, row_id, **WHY)
        return
    before = await outbox.inspect(row_id)
    with pytest.raises(Conflict, match=f"cannot {verb} row {row_id}: it is {status}") as refusal:
        await outbox.act(verb, row_id, **WHY)
    assert refusal.value.code == "wrong_state"
    assert await outbox.inspect(row_id) == before


@pytest.mark.parametrize("status", STATES)
async def test_only_a_held_row_is_released(outbox: Outbox, status: str) -> None:
    row_id = await row_in(outbox, status)
    with pytest.raises(Conflict, match=f"cannot release row {row_id}"):
        await outbox.act("release", row_id, **WHY)
