"""The relay stopped, cancelled or killed in the middle, and beside a full disk."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import structlog
from support.relaying import ids_of, rows_of
from support.waiting import until


async def test_answers_that_a_full_disk_does_not_take_are_stored_once_there_is_space_and_not_asked_for_again(
    scripted_broker, station, answers
):
    accepted, _ = answers
    here = await station(scripted_broker.url)

    async def limit(pages: str) -> None:
        query = f"PRAGMA max_page_count = {pages}"
        await here.outbox._store.run(lambda db: db.execute(query).fetchone())

    scripted_broker.judge = lambda items: [accepted(item) | {"broker_message_id": "b" * 128} for item in items]
    scripted_broker.gate.clear()
    ids = ids_of(500)
    await here.send(*ids)
    here.run()
    await scripted_broker.until(lambda: len(scripted_broker.batches) == 1)
    await limit("1")  # SQLite takes the file's present size where that is more
    with structlog.testing.capture_logs() as logs:
        scripted_broker.gate.set()
        await until(lambda: any(line["event"] == "settlement_not_stored" for line in logs))
    assert (await here.outbox.counts()).rows["inflight"] == 500
    await limit("1000000")
    assert {(row.status, row.attempts) for row in await here.settled(*ids)} == {("done", 1)}
    assert len(scripted_broker.batches) == 1


async def test_after_a_crash_between_post_and_settle_the_message_is_a_duplicate_and_done(
    scripted_broker, station, answers, tmp_path, token_file
):
    accepted, _ = answers
    kept: dict[str, dict] = {}

    def judge(items):
        answer = []
        for item in items:
            one = item["client_message_id"]
            again = one in kept
            kept.setdefault(one, accepted(item, history_id=len(kept) + 1))
            answer.append(kept[one] | ({"status": 200, "duplicate": True} if again else {}))
        return answer

    scripted_broker.judge = judge
    here = await station(scripted_broker.url)
    ids = ids_of(100)
    await here.send(*ids)
    await here.end()
    scripted_broker.gate.clear()
    program = [sys.executable, str(Path(__file__).with_name("relay_process.py"))]
    process = await asyncio.create_subprocess_exec(
        *program, scripted_broker.url, str(tmp_path / "state"), str(token_file)
    )
    await scripted_broker.until(lambda: len(scripted_broker.batches) == 1)
    judge([{"client_message_id": one} for one in scripted_broker.batches[0]])  # the broker commits …
    process.kill()  # … and nobody is there to hear of it
    await process.wait()
    scripted_broker.gate.set()
    here = await station(scripted_broker.url)
    here.run()
    rows = await here.settled(*ids)
    assert {(row.status, row.attempts) for row in rows} == {("done", 2)}
    assert sorted(row.history_id for row in rows) == list(range(1, 101))
    assert len(kept) == 100


async def test_a_stop_during_a_post_waits_for_its_answer_and_settles(scripted_broker, station):
    scripted_broker.gate.clear()
    here = await station(scripted_broker.url, speed=1)
    await here.send("a")
    here.run()
    await scripted_broker.until(lambda: len(scripted_broker.batches) == 1)
    stopping = asyncio.create_task(here.relay.stop())
    await until(lambda: here.relay.status().state == "stopped")
    await here.send("b")
    scripted_broker.gate.set()
    await stopping
    assert here.task.done()
    assert [(row.client_message_id, row.status) for row in await rows_of(here)] == [("a", "done"), ("b", "pending")]


async def test_a_stop_does_not_wait_for_ever_and_gives_the_rows_back(scripted_broker, station):
    scripted_broker.gate.clear()
    here = await station(scripted_broker.url, link={"request_seconds": 600})
    ids = ids_of(700)
    await here.send(*ids)
    here.run()
    await scripted_broker.until(lambda: len(scripted_broker.batches) == 2)
    await here.relay.stop()
    assert {(row.status, row.attempts) for row in await rows_of(here)} == {("pending", 0)}


async def test_a_cancelled_run_and_a_stop_leave_nothing_inflight(scripted_broker, station):
    scripted_broker.gate.clear()
    here = await station(scripted_broker.url)
    await here.send(*ids_of(700))
    here.run()
    await scripted_broker.until(lambda: len(scripted_broker.batches) == 1)
    here.task.cancel()
    await asyncio.gather(here.task, return_exceptions=True)
    await here.relay.stop()
    await here.relay.stop()
    assert {row.status for row in await rows_of(here)} == {"pending"}


async def test_a_relay_that_never_ran_can_be_stopped(scripted_broker, station):
    here = await station(scripted_broker.url)
    await here.relay.stop()
    assert here.relay.status().state == "stopped"
