"""Room: what waits is bounded, what is done makes room for it, and of old rows stays what keeps their ids used."""

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from itertools import count, islice
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from support.outboxes import ALICE, WHY, Clock, accepted, counted, opened, row_in, send
from support.small_disk import run_on_a_small_disk
from support.waiting import until_so

from outbox import AcceptedRow, Outbox, OutboxSettings, RowFilter, Settlement, Verdict
from outbox.transaction import room_of
from postroom._wire.ids import new_id
from postroom._wire.operations import VERBS
from postroom.errors import Conflict, NotFound, TryAgain

OpenOutbox = Callable[..., Awaitable[Outbox]]
MIB = 1024 * 1024


async def relayed(outbox: Outbox) -> None:
    """Have the broker accept everything that is due."""
    while claimed := await outbox.claim():
        broker_ids = [str(uuid4()) for _ in claimed]
        await outbox.settle(
            [
                Settlement(row.row_id, Verdict.DONE, broker_message_id=broker_id, history_id=1_000_000)
                for row, broker_id in zip(claimed, broker_ids, strict=True)
            ]
        )


async def settled_row(outbox: Outbox, status: str, name: str) -> str:
    """Write a row, bring it to `status`, and prune it; a younger row stays."""
    row_id = await row_in(outbox, status, name)
    assert (await outbox.prune(2**62, **WHY))[0] == 1
    return row_id


def bytes_of(database: Path, *names: str) -> int:
    """Sum the pages of some tables."""
    with opened(database) as db:
        rows = db.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name").fetchall()
    return sum(size for name, size in rows if name.startswith(names))


async def pushed_through(outbox: Outbox, body: str, room: int) -> int:
    """Send until messages have taken `room` bytes, relaying in between; returns how many were refused."""
    at_once = max(1, 100_000 // len(body))
    refused = 0
    for _ in range(0, room, at_once * room_of(len(send("x", body).payload))):
        outcomes = await outbox.accept([send(new_id(), body) for _ in range(at_once)], ALICE)
        refused += sum(not isinstance(outcome, AcceptedRow) for outcome in outcomes)
        await relayed(outbox)
    return refused


@pytest.mark.parametrize("size", [100, 1024, 102_400])
async def test_ten_times_max_bytes_pass_without_a_refusal_in_a_file_that_stays_small(tmp_path: Path, size: int) -> None:
    async with await Outbox.open(tmp_path, OutboxSettings(max_bytes=MIB)) as outbox:
        assert await pushed_through(outbox, "x" * size, 10 * MIB) == 0
        counts = await outbox.counts()
    assert counts.waiting_bytes == 0
    settled = bytes_of(tmp_path / "outbox.db", "outbox_settled")
    assert counts.used_bytes - settled < 1.1 * MIB
    assert counts.wal_bytes < 8 * MIB


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [100, 1024, 102_400])
async def test_ten_times_64_mib_pass_without_a_refusal(tmp_path: Path, size: int) -> None:
    async with await Outbox.open(tmp_path, OutboxSettings(max_bytes=64 * MIB)) as outbox:
        assert await pushed_through(outbox, "x" * size, 640 * MIB) == 0


@pytest.mark.parametrize(
    "name",
    [new_id, lambda: str(uuid4()), (f"order-2026-{number:08d}-x" for number in count()).__next__],
    ids=["ULIDs", "UUIDs", "names"],
)
async def test_a_settled_row_of_old_takes_at_most_150_bytes_with_its_indexes(
    tmp_path: Path, name: Callable[[], str]
) -> None:
    rows = 6000
    async with await Outbox.open(tmp_path) as outbox:
        for _ in range(0, rows, 500):
            await accepted(outbox, *(send(name(), priority="now") for _ in range(500)))
        await relayed(outbox)
        assert (await outbox.prune(2**62, **WHY))[0] == rows
    kept = bytes_of(tmp_path / "outbox.db", "outbox_settled", "outbox_common") / rows
    print(f"a settled row takes {kept:.0f} bytes")  # noqa: T201
    assert kept <= 150


async def test_the_room_of_a_row_is_what_the_file_says(outbox: Outbox, database: Path) -> None:
    for size in (0, 10, 500, 4000, 4100, 8000, 100_000):
        await accepted(outbox, send(f"id-{size}", "x" * size))
    with opened(database) as db:
        rooms = db.execute("SELECT payload_bytes, room FROM outbox").fetchall()
        (expression,) = (row[0] for row in db.execute("SELECT sql FROM sqlite_schema WHERE name = 'outbox'"))
        formula = expression.split("room                INTEGER GENERATED ALWAYS AS (")[1].split(") VIRTUAL")[0]
        size = "SELECT 0 AS payload_bytes UNION ALL SELECT payload_bytes + 1 FROM size LIMIT 13000"
        sizes = db.execute(f"WITH RECURSIVE size AS ({size}) SELECT payload_bytes, {formula} FROM size").fetchall()  # noqa: S608 - of the schema
    assert [(size, room_of(size)) for size, _ in rooms] == rooms
    assert [(size, room_of(size)) for size, _ in sizes] == sizes


async def test_payloads_go_after_a_time_by_a_confirmed_clock_and_rows_that_waited_longer_do_not_hold_them_up(
    tmp_path: Path, clock: Clock
) -> None:
    async with await Outbox.open(tmp_path, OutboxSettings(keep_payloads=1), clock=clock) as outbox:
        await row_in(outbox, "dead", "waits")
        for number in range(300):
            await accepted(outbox, send(f"old-{number}"))
        await relayed(outbox)
        clock.forward(86_400 + 1)
        await row_in(outbox, "done", "young")
        confirmed = asyncio.Event()

        async def confirmed_time() -> int:
            await confirmed.wait()
            return clock.now

        pruning = asyncio.create_task(outbox.prune_by_age(confirmed_time))

        async def all_are_pruned() -> bool:
            return (await outbox.row("old-299")).payload_pruned_at is not None

        assert not await all_are_pruned()
        confirmed.set()
        await until_so(all_are_pruned)
        pruning.cancel()
        listed = (await outbox.list_rows(RowFilter(), limit=1000)).rows
    assert {row.client_message_id for row in listed if row.payload_pruned_at is None} == {"waits", "young"}


async def test_dead_rows_count_as_waiting_and_the_refusal_says_so(open_outbox: OpenOutbox) -> None:
    outbox = await open_outbox(max_bytes=MIB)
    body = "x" * 50_000
    for number in range(30):
        await outbox.accept([send(f"id-{number}", body)], ALICE)
    claimed = await outbox.claim(limit=1000, max_bytes=2**30)
    await outbox.settle([Settlement(row.row_id, Verdict.DEAD, last_error="gone: it is") for row in claimed])
    (refused,) = await outbox.accept([send("new", body)], ALICE)
    assert isinstance(refused, TryAgain)
    assert (refused.code, "dead" in str(refused), "abort" in str(refused)) == ("outbox_full", True, True)
    await outbox.act("abort", "id-0", **WHY)
    await outbox.act("abort", "id-1", **WHY)
    (new,) = await outbox.accept([send("new", body)], ALICE)
    assert isinstance(new, AcceptedRow)
    await outbox.close()


async def test_a_requeue_with_a_larger_message_is_refused_where_there_is_no_room_for_it(
    open_outbox: OpenOutbox,
) -> None:
    async with await open_outbox(max_bytes=MIB) as outbox:
        await accepted(outbox, send("small"), send("large", "x" * 900_000))
        larger = send("patch", "x" * 200_000)
        with pytest.raises(TryAgain, match="95 % of") as refusal:
            await outbox.act("requeue", "small", patch=larger, **WHY)
        assert (refusal.value.code, (await outbox.row("small")).status) == ("outbox_full", "pending")
        successor = await outbox.act("requeue", "large", **WHY)  # it takes no more than what it replaces
        await outbox.act("requeue", successor.id, patch=larger, **WHY)
        await outbox.act("requeue", "small", patch=larger, **WHY)  # now there is room


async def test_a_file_that_is_beyond_a_lowered_max_bytes_takes_new_messages_and_shrinks(
    open_outbox: OpenOutbox, database: Path
) -> None:
    outbox = await open_outbox()
    for number in range(60):
        await accepted(outbox, send(f"id-{number}", "x" * 50_000))
    await relayed(outbox)
    waiting = await accepted(outbox, *(send(f"waits-{number}", "x" * 50_000) for number in range(10)))
    await outbox.close()
    again = await open_outbox(max_bytes=MIB)
    await accepted(again, send("new", "x" * 50_000))

    async def it_is_small() -> bool:
        return (await again.counts()).used_bytes - bytes_of(database, "outbox_settled") < 0.95 * MIB

    await until_so(it_is_small)
    assert (await again.counts()).rows["done"] == 60
    assert {row.client_message_id for row in await again.claim(max_bytes=2**30)} == {
        "new",
        *(f"waits-{number}" for number in range(len(waiting))),
    }
    await again.close()


@pytest.mark.parametrize("status", ["done", "aborted"])
async def test_a_pruned_row_is_answered_shown_and_refused_like_any_other(outbox: Outbox, status: str) -> None:
    name = new_id()
    row_id = await row_in(outbox, status, name)
    before = (await outbox.inspect(row_id)).row
    (answer,) = await accepted(outbox, send(name))
    assert (await outbox.prune(2**62, **WHY))[0] == 1
    (again,) = await accepted(outbox, send(name))
    assert again == msgspec.structs.replace(answer, last_error=None)
    for key in (row_id, name):
        after = (await outbox.inspect(key)).row
        assert after.payload_pruned_at is not None
        for field in set(before.__struct_fields__) - {"payload_pruned_at", "payload_bytes", "next_attempt_at"}:
            assert getattr(after, field) == getattr(before, field), field
    assert (await outbox.list_rows(RowFilter(status=status))).rows == [after]  # type: ignore[arg-type]
    assert (await outbox.list_rows(RowFilter(ids=[name]))).rows == [after]
    assert (await outbox.list_rows(RowFilter(ids=[row_id]))).rows == [after]
    assert await outbox.row(name) == after
    assert await outbox.find_all([name, "nobody"]) == [after]
    for verb in VERBS.keys() - {"requeue"}:
        with pytest.raises(Conflict, match=f"cannot {verb} row {row_id}: it is {status}"):
            await outbox.act(verb, row_id, **WHY)
    with pytest.raises(Conflict, match="payload was pruned"):
        await outbox.act("requeue", name, **WHY)
    other = await row_in(outbox, "dead", "other")
    with pytest.raises(Conflict, match="was used before"):
        await outbox.act("requeue", other, new_client_message_id=name, **WHY)
    with pytest.raises(NotFound):
        await outbox.inspect("nobody")


async def test_a_chain_holds_together_whichever_of_its_rows_are_pruned(outbox: Outbox, clock: Clock) -> None:
    first = await row_in(outbox, "dead", "first")
    second = await outbox.act("requeue", first, **WHY)
    clock.forward(10)
    third = await outbox.act("requeue", second.id, **WHY)
    chain = [first, second.id, third.id]
    assert (await outbox.prune(clock.now, **WHY))[0] == 1
    assert [row.id for row in (await outbox.inspect(third.id)).chain] == chain
    clock.forward(1)
    assert (await outbox.prune(clock.now, **WHY))[0] == 1
    await outbox.act("abort", third.id, **WHY)
    clock.forward(1)
    assert (await outbox.prune(clock.now, **WHY))[0] == 1
    for row_id in chain:
        found = await outbox.inspect(row_id)
        assert [row.id for row in found.chain] == chain
        assert [row.superseded_by for row in found.chain] == [second.id, third.id, None]
        assert [line.verb for line in found.log] == ["requeue", "requeue", "abort"]


async def test_numbers_go_on_after_the_newest_row_was_pruned(outbox: Outbox, open_outbox: OpenOutbox) -> None:
    for name in ("a", "b"):
        await settled_row(outbox, "done", name)
    rows = await accepted(outbox, send("a"), send("c"), send("c"), send("d"), send("b"))
    assert [row.inserted for row in rows] == [False, True, False, True, False]
    await outbox.act("abort", "c", **WHY)
    await outbox.act("abort", "d", **WHY)
    assert (await outbox.prune(2**62, **WHY))[0] == 2
    await outbox.close()
    again = await open_outbox()
    await accepted(again, send("e"))
    await again.act("requeue", "e", **WHY)
    names = [row.client_message_id for row in (await again.list_rows(RowFilter())).rows]
    assert names[:-1] == ["a", "b", "c", "d", "e"]
    with opened(again._store.path) as db:
        assert db.execute(
            "SELECT group_concat(seq, ' ') FROM (SELECT seq FROM outbox_whole ORDER BY seq)"
        ).fetchone() == ("1 2 3 4 5 6",)
    await again.close()


async def test_a_row_is_found_by_its_id_also_when_the_clock_was_set_back_before_a_start(state: Path) -> None:
    ids = iter(["01JZZZZZZZZZZZZZZZZZZZZZZZ", *(f"01J{number:023d}" for number in range(1, 10))])
    found = []
    for name in ("before", "after", "later"):
        async with await Outbox.open(state, new_ids=lambda count: list(islice(ids, count))) as outbox:
            found.append(await settled_row(outbox, "done", name))
            await row_in(outbox, "dead", f"{name}, and then")
    async with await Outbox.open(state, new_ids=lambda count: list(islice(ids, count))) as outbox:
        assert found == sorted(found)
        assert [(await outbox.inspect(row_id)).row.client_message_id for row_id in found] == [
            "before",
            "after",
            "later",
        ]


async def test_ids_with_one_key_are_told_apart(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outbox.settled.key_of", lambda *_: 7)
    for name in ("a", "b", "c"):
        await settled_row(outbox, "done", name)
    rows = await accepted(outbox, *(send(name) for name in ("b", "new", "c")))
    assert [(row.inserted, row.status) for row in rows] == [(False, "done"), (True, "pending"), (False, "done")]
    row = await outbox.row("b")
    assert row is not None
    assert row.client_message_id == "b"


async def test_pruning_keeps_the_counters(tmp_path: Path) -> None:
    async with await Outbox.open(tmp_path, OutboxSettings(max_bytes=MIB)) as outbox:
        await pushed_through(outbox, "x" * 1000, 3 * MIB)
        await row_in(outbox, "dead", "dead")
    with opened(tmp_path / "outbox.db") as db:
        kept = db.execute("SELECT waiting_room, kept_room, moved FROM tally").fetchone()
        counted_now = db.execute(
            "SELECT sum(room) FILTER (WHERE status NOT IN ('done', 'aborted')), "
            "sum(room) FILTER (WHERE status IN ('done', 'aborted')), (SELECT count(*) FROM outbox_settled) FROM outbox"
        ).fetchone()
        assert kept == counted_now
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
    async with await Outbox.open(tmp_path) as outbox:
        counts = await outbox.counts()
    assert counts.rows == counted(tmp_path / "outbox.db")
    assert counts.waiting_bytes == room_of(len(send("dead").payload))


@pytest.mark.parametrize("change", ["DELETE FROM outbox_settled", "UPDATE outbox_settled SET history_id = 9"])
async def test_what_was_pruned_is_frozen(outbox: Outbox, database: Path, change: str) -> None:
    await settled_row(outbox, "done", "a")
    with opened(database) as db, pytest.raises(sqlite3.IntegrityError):
        db.execute(change)


FULL_DISK = """
import asyncio, contextlib, os, sys
from pathlib import Path
from postroom.chassis import logs
from support.outboxes import ALICE, WHY, done, send
from outbox import AcceptedRow, Outbox, OutboxSettings

async def main(directory):
    outbox = await Outbox.open(directory / "state", OutboxSettings(max_bytes=2 * 1024 * 1024))
    ballast = Path(f"{directory}/ballast")
    sent, met = 0, set()
    for round_ in range(300):
        if round_ == 100:
            file = os.open(ballast, os.O_WRONLY | os.O_CREAT)
            with contextlib.suppress(OSError):
                while True:
                    os.write(file, b"x" * 4096)
            os.close(file)
        if round_ == 150:
            ballast.unlink()
        outcomes = await outbox.accept([send(f"{round_}-{each}", "x" * 2000) for each in range(10)], ALICE)
        sent += sum(isinstance(outcome, AcceptedRow) for outcome in outcomes)
        met |= {outcome.code for outcome in outcomes if not isinstance(outcome, AcceptedRow)}
        try:
            claimed = await outbox.claim()
            await outbox.settle([done(row.row_id) for row in claimed])
        except Exception as error:
            met.add(error.code)
    print(sorted(met - {"disk_full"}), outbox.healthy)
    for _ in range(100):
        claimed = await outbox.claim()
        await outbox.settle([done(row.row_id) for row in claimed])
    (last,) = await outbox.accept([send("last", "x" * 2000)], ALICE)
    counts = await outbox.counts()
    print(isinstance(last, AcceptedRow), sum(counts.rows.values()) == sent + 1)
    await outbox.close()

logs.configure("critical")
asyncio.run(main(Path(sys.argv[1])))
"""


async def test_a_full_disk_under_the_pruning_costs_no_row_and_ends_by_itself(tmp_path: Path) -> None:
    assert await run_on_a_small_disk(tmp_path, FULL_DISK, megabytes=6) == ["[] True", "True True"]
