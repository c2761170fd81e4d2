"""The relay on a real outbox, against a scripted broker over real HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import structlog
from aiohttp import web
from aiohttp.test_utils import TestServer

from chassis.exits import Exit, Fatal
from outbox.model import Caller, RowFilter
from postroom.message import prepare

ME = Caller(0, 0)
HOUR = 3600  # seconds


def ids_of(count: int) -> list[str]:
    return [f"id-{n:04}" for n in range(count)]


def whole(status: int, **headers: str):
    return web.json_response({"code": "why_not", "detail": "because"}, status=status, headers=headers)


async def rows_of(here) -> list:
    return [row async for row in here.outbox.export(RowFilter())]


async def until(condition) -> None:
    """Wait for what has no event of its own."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


# -- batches -------------------------------------------------------------------------------------------------------


async def test_a_backlog_is_relayed_in_batches_and_settled(scripted_broker, station):
    here = await station(scripted_broker.url)
    ids = ids_of(1200)
    await here.send(*ids)
    here.run()
    rows = await here.settled(*ids)
    assert {row.status for row in rows} == {"done"}
    assert {row.attempts for row in rows} == {1}
    assert all(row.broker_message_id and row.history_id for row in rows)
    assert sorted(scripted_broker.done) == ids
    assert max(map(len, scripted_broker.batches)) == 500
    assert here.relay.status().state == "relaying"
    assert here.relay.counters.attempts["accepted"] == 1200
    assert here.relay.counters.batches == {"answered": len(scripted_broker.batches)}


async def test_at_most_four_batches_are_under_way_at_once(scripted_broker, station):
    scripted_broker.gate.clear()
    here = await station(scripted_broker.url)
    ids = ids_of(3000)
    await here.send(*ids)
    here.run()
    await scripted_broker.until(lambda: len(scripted_broker.batches) == 4)
    assert (await here.outbox.counts()).rows["inflight"] == 2000
    scripted_broker.gate.set()
    await here.settled(*ids)
    assert scripted_broker.most_at_once == 4


async def test_a_batch_holds_at_most_a_mebibyte(scripted_broker, station):
    here = await station(scripted_broker.url, batch_bytes=4096)
    ids = ids_of(200)
    await here.send(*ids)
    here.run()
    await here.settled(*ids)
    assert max(map(len, scripted_broker.batches)) < 200


async def test_a_batch_is_no_larger_than_the_broker_takes(scripted_broker, station):
    scripted_broker.features = lambda: web.json_response(FEATURES | {"max_batch": 7})
    here = await station(scripted_broker.url)
    ids = ids_of(30)
    await here.send(*ids)
    here.run()
    await here.settled(*ids)
    assert max(map(len, scripted_broker.batches)) == 7


async def test_a_send_that_comes_while_the_relay_is_idle_goes_at_once(scripted_broker, station):
    here = await station(scripted_broker.url, speed=1)
    here.run()
    await until(lambda: here.relay.status().state == "relaying")
    await here.send("a")
    assert [row.status for row in await here.settled("a")] == ["done"]


async def test_what_comes_while_a_post_is_under_way_shares_the_next_one(scripted_broker, station):
    scripted_broker.gate.clear()
    here = await station(scripted_broker.url, speed=0.01)
    here.run()
    await here.send("a")
    await scripted_broker.until(lambda: len(scripted_broker.batches) == 1)
    await here.send("b")
    await here.send("c")
    await scripted_broker.until(lambda: len(scripted_broker.batches) == 2)
    scripted_broker.gate.set()
    await here.settled("a", "b", "c")
    assert scripted_broker.batches == [["a"], ["b", "c"]]


# -- the answers for one message -----------------------------------------------------------------------------------


async def test_each_message_of_a_batch_is_settled_by_its_own_answer(scripted_broker, station, answers):
    accepted, refused = answers
    seen: set[str] = set()

    def judge(items):
        first = {
            "conflict": lambda item: refused(item, 409, "idempotency_key_reused"),
            "gone": lambda item: refused(item, 404, "topic_not_found"),
            "large": lambda item: refused(item, 413, "payload_too_large"),
            "limited": lambda item: refused(item, 429, "rate_limited", retry_after=5),
            "failed": lambda item: refused(item, 503, "database_down"),
            "twice": lambda item: accepted(item) | {"status": 200, "duplicate": True, "history_available": False},
        }
        answer = [
            accepted(item) if (one := item["client_message_id"]) in seen or one not in first else first[one](item)
            for item in items
        ]
        seen.update(item["client_message_id"] for item in items)
        return answer

    scripted_broker.judge = judge
    here = await station(scripted_broker.url)
    ids = ["fine", "conflict", "gone", "large", "limited", "failed", "twice"]
    await here.send(*ids)
    here.run()
    rows = dict(zip(ids, await here.settled(*ids), strict=True))
    assert {one: row.status for one, row in rows.items()} == {
        "fine": "done",
        "conflict": "dead",
        "gone": "dead",
        "large": "dead",
        "limited": "done",
        "failed": "done",
        "twice": "done",
    }
    assert rows["gone"].last_error == "topic_not_found: no"
    assert [rows[one].attempts for one in ("fine", "limited", "failed")] == [1, 2, 2]


async def test_an_exhausted_limit_is_not_hammered_with_the_whole_backlog(scripted_broker, station, answers):
    accepted, refused = answers
    left = 600

    def judge(items):
        nonlocal left
        passed = items[:left]
        left -= len(passed)
        limited = [refused(item, 429, "rate_limited", retry_after=30) for item in items[len(passed) :]]
        return [accepted(item) for item in passed] + limited

    scripted_broker.judge = judge
    here = await station(scripted_broker.url, speed=1, posts_at_once=1)
    await here.send(*ids_of(5000))
    here.run()
    await until(lambda: here.relay.status().state == "waiting")
    counts = (await here.outbox.counts()).rows
    assert (counts["done"], counts["dead"]) == (600, 0)
    assert "limit" in (here.relay.status().reason or "")
    assert not here.relay.status().degraded
    assert sum(map(len, scripted_broker.batches)) <= 1500


async def test_what_the_broker_needs_being_away_burns_no_attempt_of_the_backlog(scripted_broker, station, answers):
    _, refused = answers
    scripted_broker.judge = lambda items: [refused(item, 503, "outcome_unknown") for item in items]
    here = await station(scripted_broker.url, speed=1)
    await here.send(*ids_of(3000))
    here.run()
    await until(lambda: here.relay.status().state == "waiting")
    assert "outcome_unknown" in (here.relay.status().reason or "")
    assert sum(map(len, scripted_broker.batches)) <= 2000
    posted = [(await here.outbox.find(message_id)).attempts for message_id in scripted_broker.batches[0]]
    assert set(posted) == {0}


# -- the whole request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [lambda: whole(503), lambda: web.Response(text="<html>"), lambda: whole(502)])
async def test_an_outage_longer_than_any_schedule_kills_nothing_and_the_backlog_drains_by_itself(
    scripted_broker, station, answers, answer
):
    accepted, _ = answers
    scripted_broker.judge = lambda _: answer()
    here = await station(scripted_broker.url, speed=100_000)
    ids = ids_of(2500)
    await here.send(*ids)
    here.run()
    await scripted_broker.until(lambda: len(scripted_broker.batches) >= 40)
    probes = scripted_broker.batches[4:]
    assert max(map(len, probes)) <= 10
    assert here.relay.status().state == "waiting"
    scripted_broker.judge = lambda items: [accepted(item) for item in items]
    rows = await here.settled(*ids)
    assert {row.status for row in rows} == {"done"}
    assert {row.attempts for row in rows} == {1}
    assert sorted(scripted_broker.done) == ids


async def test_a_broker_that_is_not_there_at_the_start_is_no_reason_not_to_start(
    scripted_broker, station, unused_tcp_port
):
    here = await station(f"http://127.0.0.1:{unused_tcp_port}", speed=100_000)
    await here.send("a", "b")
    here.run()
    await until(lambda: here.relay.status().state == "waiting")
    assert "cannot connect" in (here.relay.status().reason or "")
    await here.clock.sleep(48 * HOUR)
    assert {row.attempts for row in await rows_of(here)} == {0}
    async with TestServer(scripted_broker.application(), port=unused_tcp_port):
        rows = await here.settled("a", "b")
        assert {(row.status, row.attempts) for row in rows} == {("done", 1)}


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_wrong_token_kills_nothing_and_says_degraded(scripted_broker, station, answers, status):
    accepted, _ = answers
    scripted_broker.judge = lambda _: whole(status)
    here = await station(scripted_broker.url, speed=100_000)
    ids = ids_of(1000)
    await here.send(*ids)
    here.run()
    await scripted_broker.until(lambda: len(scripted_broker.batches) >= 20)
    await until(lambda: here.relay.status().degraded)
    assert f"answered {status}" in (here.relay.status().reason or "")
    assert {(row.status, row.attempts) for row in await rows_of(here)} <= {("pending", 0), ("inflight", 0)}
    scripted_broker.judge = lambda items: [accepted(item) for item in items]
    assert {(row.status, row.attempts) for row in await here.settled(*ids)} == {("done", 1)}
    assert not here.relay.status().degraded


async def test_a_token_file_that_is_gone_is_degraded_until_it_is_back(scripted_broker, station, token_file):
    token_file.rename(token_file.with_suffix(".away"))
    here = await station(scripted_broker.url)
    await here.send("a")
    here.run()
    await until(lambda: here.relay.status().degraded)
    assert str(token_file) in (here.relay.status().reason or "")
    token_file.with_suffix(".away").rename(token_file)
    assert [row.status for row in await here.settled("a")] == ["done"]


async def test_a_broker_that_says_when_is_left_alone_until_then(scripted_broker, station):
    scripted_broker.judge = lambda _: whole(503, **{"Retry-After": "600"})
    here = await station(scripted_broker.url, speed=1)
    await here.send("a")
    here.run()
    await until(lambda: here.relay.counters.batches["broker_failed"] == 1)
    await here.relay.stop()
    (row,) = await rows_of(here)
    assert row.status == "pending"
    assert (row.next_attempt_at - row.enqueued_at).total_seconds() >= 600


async def test_a_probe_can_be_asked_for(scripted_broker, station, answers):
    accepted, _ = answers
    scripted_broker.judge = lambda _: whole(503, **{"Retry-After": "600"})
    here = await station(scripted_broker.url, speed=1)
    await here.send("a")
    here.run()
    await until(lambda: here.relay.status().state == "waiting")
    scripted_broker.judge = lambda items: [accepted(item) for item in items]
    await here.send("b")
    here.relay.probe_now()
    assert [row.status for row in await here.settled("b")] == ["done"]


# -- halving -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [lambda: whole(500), lambda: whole(413), lambda: web.Response(text="<html>")])
async def test_a_poison_message_in_a_batch_of_500_is_found_by_halving_and_backed_off_alone(
    scripted_broker, station, answers, answer
):
    accepted, _ = answers
    ids = ids_of(500)
    poison = ids[321]

    def judge(items):
        if any(item["client_message_id"] == poison for item in items):
            return answer()
        return [accepted(item) for item in items]

    scripted_broker.judge = judge
    here = await station(scripted_broker.url)
    await here.send(*ids)
    here.run()
    healthy = [one for one in ids if one != poison]
    rows = await here.settled(*healthy)
    assert {(row.status, row.attempts) for row in rows} == {("done", 1)}
    before = len(scripted_broker.batches)
    assert before < 40
    await until(lambda: here.relay.counters.attempts["failed"] >= 3)
    row = await here.outbox.find(poison)
    assert row.status in {"pending", "inflight"}
    assert row.attempts >= 2
    assert scripted_broker.batches[before + 1 :] == [[poison]] * (len(scripted_broker.batches) - before - 1)


async def test_a_poison_message_does_not_hold_up_those_that_come_later(scripted_broker, station, answers):
    accepted, _ = answers
    scripted_broker.judge = lambda items: (
        whole(500)
        if any(item["client_message_id"] == "poison" for item in items)
        else [accepted(item) for item in items]
    )
    here = await station(scripted_broker.url)
    await here.send("poison")
    here.run()
    await scripted_broker.until(lambda: len(scripted_broker.batches) >= 5)
    ids = ids_of(50)
    await here.send(*ids)
    assert {row.status for row in await here.settled(*ids)} == {"done"}
    await until(lambda: here.relay.counters.attempts["failed"] >= 2)
    assert here.relay.status().state == "relaying"
    scripted_broker.judge = lambda items: [accepted(item) for item in items]
    assert [row.status for row in await here.settled("poison")] == ["done"]


# -- a full disk ------------------------------------------------------------------------------------------------------


async def test_answers_that_a_full_disk_does_not_take_are_stored_once_there_is_space_and_not_asked_for_again(
    scripted_broker, station, answers
):
    accepted, _ = answers
    here = await station(scripted_broker.url)

    async def limit(pages: str) -> None:
        query = f"PRAGMA max_page_count = {pages}"
        await here.outbox._writer._connection.run(lambda db: db.execute(query).fetchone())

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


# -- crash and stop ------------------------------------------------------------------------------------------------


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


# -- operators -----------------------------------------------------------------------------------------------------


async def test_a_paused_relay_posts_nothing_until_it_is_resumed(scripted_broker, station):
    here = await station(scripted_broker.url, speed=100_000)
    await here.outbox.set_relay_control(None, paused=True, caller=ME, reason="the receiver is down")
    await here.send("a")
    here.run()
    await until(lambda: here.relay.status().state == "paused")
    await here.clock.sleep(HOUR)
    assert scripted_broker.batches == []
    await here.outbox.set_relay_control(None, paused=False, caller=ME, reason="it is back")
    await here.relay.controls_changed()
    assert [row.status for row in await here.settled("a")] == ["done"]


async def test_a_change_of_the_controls_shows_in_the_status_at_once(scripted_broker, station):
    here = await station(scripted_broker.url)
    await here.outbox.set_relay_control(None, paused=True, caller=ME, reason="the receiver is down")
    await here.relay.controls_changed()
    assert here.relay.status().state == "paused"


async def test_a_paused_destination_waits_while_the_others_go(scripted_broker, station):
    here = await station(scripted_broker.url)
    await here.outbox.set_relay_control("topic:slow", paused=True, caller=ME, reason="it is down")
    await here.send(*ids_of(20), to="topic:slow")
    await here.send("a")
    here.run()
    assert [row.status for row in await here.settled("a")] == ["done"]
    assert scripted_broker.batches == [["a"]]
    assert here.relay.status().paused_destinations == ["topic:slow"]
    await here.outbox.set_relay_control("topic:slow", paused=False, caller=ME, reason="it is back")
    await here.relay.controls_changed()
    assert {row.status for row in await here.settled(*ids_of(20))} == {"done"}


@pytest.mark.parametrize("destination", [None, "topic:slow"])
async def test_a_rate_is_kept(scripted_broker, station, answers, destination):
    accepted, _ = answers
    posted: list[int] = []
    here = await station(scripted_broker.url, speed=50)

    def judge(items):
        posted.extend([here.clock.now_ms()] * len(items))
        return [accepted(item) for item in items]

    scripted_broker.judge = judge
    await here.outbox.set_relay_control(destination, paused=False, rate_per_second=20, caller=ME, reason="gently")
    ids = ids_of(200)
    await here.send(*ids, to="topic:slow")
    started = here.clock.now_ms()
    here.run()
    await here.settled(*ids)
    for count, moment in enumerate(posted, start=1):
        assert count <= 20 * (moment - started) / 1000 + 1
    assert len(scripted_broker.batches) < 150


# -- features and age ----------------------------------------------------------------------------------------------

FEATURES = {
    "mesh": "demo",
    "member": "alice",
    "max_batch": 1000,
    "client_message_id_dedupe": {
        "version": 1,
        "mode": "retention_scoped",
        "request_fingerprint": True,
        "dedupe_retention_days": 30,
    },
}


async def test_the_brokers_window_decides_how_old_a_row_may_become_and_is_kept_on_disk(scripted_broker, station):
    scripted_broker.features = lambda: web.json_response(FEATURES)
    here = await station(scripted_broker.url)
    assert here.relay.max_age_hours == 144
    here.run()
    await until(lambda: here.relay.status().state == "relaying")
    assert here.relay.max_age_hours == 648
    await here.end()
    again = await station("http://127.0.0.1:1")
    assert again.relay.max_age_hours == 648


@pytest.mark.parametrize(
    "features",
    [
        {"client_message_id_dedupe": None},
        {"client_message_id_dedupe": FEATURES["client_message_id_dedupe"] | {"version": 2}},
        {"client_message_id_dedupe": FEATURES["client_message_id_dedupe"] | {"request_fingerprint": False}},
        {"client_message_id_dedupe": FEATURES["client_message_id_dedupe"] | {"dedupe_retention_days": 6}},
    ],
)
async def test_an_incompatible_broker_stops_the_daemon_and_gets_no_message(scripted_broker, station, features):
    scripted_broker.features = lambda: web.json_response(FEATURES | features)
    here = await station(scripted_broker.url)
    await here.send("a")
    here.run()
    with pytest.raises(Fatal) as caught:
        await here.task
    assert caught.value.exit_code is Exit.CONFIG
    assert scripted_broker.batches == []


async def test_an_override_past_the_window_stops_the_daemon(scripted_broker, station):
    here = await station(scripted_broker.url, max_age_hours=200)
    here.run()
    with pytest.raises(Fatal, match=r"relay\.max_age_hours is 200"):
        await here.task


async def test_a_broker_that_comes_back_incompatible_stops_the_daemon_then(scripted_broker, station, unused_tcp_port):
    here = await station(f"http://127.0.0.1:{unused_tcp_port}")
    await here.send("a")
    here.run()
    await until(lambda: here.relay.status().state == "waiting")
    scripted_broker.features = lambda: web.json_response(FEATURES | {"client_message_id_dedupe": None})
    async with TestServer(scripted_broker.application(), port=unused_tcp_port):
        with pytest.raises(Fatal, match="upgrade the broker"):
            await here.task
    assert scripted_broker.batches == []


async def test_a_token_of_another_mesh_is_degraded_and_posts_nothing(scripted_broker, station):
    scripted_broker.features = lambda: web.json_response(FEATURES | {"mesh": "other"})
    here = await station(scripted_broker.url)
    await here.send("a")
    here.run()
    await until(lambda: here.relay.status().degraded)
    assert "speaks for the mesh 'other'" in (here.relay.status().reason or "")
    scripted_broker.features = lambda: web.json_response(FEATURES)
    assert [row.status for row in await here.settled("a")] == ["done"]
    assert scripted_broker.batches == [["a"]]


async def test_a_replaced_token_is_checked_before_the_next_post(scripted_broker, station, token_file):
    here = await station(scripted_broker.url)
    await here.send("a")
    here.run()
    await here.settled("a")
    fresh = token_file.with_name("fresh")
    fresh.touch(mode=0o600)
    fresh.write_text("of-another-mesh")
    fresh.replace(token_file)
    scripted_broker.features = lambda: web.json_response(FEATURES | {"mesh": "other"})
    await here.send("b")
    await until(lambda: here.relay.status().degraded)
    assert scripted_broker.batches == [["a"]]


async def test_a_row_older_than_max_age_is_dead_as_expired_and_never_posted(scripted_broker, station, unused_tcp_port):
    here = await station(f"http://127.0.0.1:{unused_tcp_port}", max_age_hours=10)
    await here.send("old")
    here.run()
    await until(lambda: here.relay.status().state == "waiting")
    here.clock.jump(hours=11)
    (row,) = await here.settled("old")
    assert row.status == "dead"
    assert row.last_error.startswith("expired: ")
    await here.send("young")
    async with TestServer(scripted_broker.application(), port=unused_tcp_port):
        assert [row.status for row in await here.settled("young")] == ["done"]
    assert scripted_broker.batches == [["young"]]
    assert here.relay.counters.attempts["expired"] == 1


async def test_a_row_meant_for_later_than_max_age_is_posted_when_it_is_due(scripted_broker, station):
    here = await station(scripted_broker.url, max_age_hours=10)
    due = datetime.fromtimestamp(here.clock.now_ms() / 1000 + 12 * HOUR, UTC)
    message = {"to": "topic:orders", "body": "b", "client_message_id": "later", "not_before": due.isoformat()}
    await here.outbox.accept([prepare(json.dumps(message).encode())], ME)
    here.run()
    await until(lambda: here.relay.status().state == "relaying")
    here.clock.jump(hours=13)
    (row,) = await here.settled("later")
    assert (row.status, row.last_error) == ("done", None)


async def test_the_features_answer_is_not_trusted_either(scripted_broker, station):
    scripted_broker.features = lambda: web.Response(text=json.dumps(FEATURES)[:-20])
    here = await station(scripted_broker.url)
    await here.send("a")
    here.run()
    await until(lambda: here.relay.status().state == "waiting")
    assert scripted_broker.batches == []
    scripted_broker.features = lambda: web.json_response(FEATURES)
    assert [row.status for row in await here.settled("a")] == ["done"]
