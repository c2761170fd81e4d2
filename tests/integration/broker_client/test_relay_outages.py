"""Answers to a whole batch: the broker away, refusing, or choking on one message of it."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.relaying import busy, ids_of, rows_of, whole
from support.waiting import until, until_so

from broker_client.channel import RequestFailed, TokenFile
from outbox import Caller, RowFilter
from postroom._wire.message import prepare

HOUR = 3600  # seconds


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


@pytest.mark.parametrize("status", [503, 429])
async def test_a_busy_broker_gets_batches_as_large_as_before_fewer_at_once_and_in_the_same_order(
    scripted_broker, station, answers, status
):
    accepted, _ = answers
    ids = ids_of(2500)
    scripted_broker.judge = lambda _: busy(status)
    here = await station(scripted_broker.url, batch_messages=100, posts_at_once=8)
    await here.send(*ids)
    here.run()
    await scripted_broker.until(lambda: len(scripted_broker.batches) >= 30)
    assert scripted_broker.most_at_once <= 8
    assert here.relay.status().state == "waiting"
    assert not here.relay.status().degraded
    scripted_broker.most_at_once = 0
    scripted_broker.judge = lambda items: [accepted(item) for item in items]
    assert {(row.status, row.attempts) for row in await here.settled(*ids)} == {("done", 1)}
    assert {len(batch) for batch in scripted_broker.batches} == {100}
    assert sorted(scripted_broker.done) == ids


async def test_posts_to_a_busy_broker_grow_by_one_until_it_is_busy_again(scripted_broker, station, answers):
    accepted, _ = answers
    most = 0

    def judge(items):
        nonlocal most
        most = max(most, scripted_broker.at_once)
        return busy() if scripted_broker.at_once > 3 else [accepted(item) for item in items]

    scripted_broker.judge = judge
    here = await station(scripted_broker.url, batch_messages=10, posts_at_once=16)
    ids = ids_of(2500)
    await here.send(*ids)
    here.run()
    assert {(row.status, row.attempts) for row in await here.settled(*ids)} == {("done", 1)}
    refused, answered = (here.relay.counters.batches[name] for name in ("broker_overloaded", "answered"))
    assert answered == 250
    assert refused < answered / 4


async def test_a_pause_by_an_operator_holds_while_the_broker_is_busy(scripted_broker, station, answers):
    accepted, _ = answers
    scripted_broker.judge = lambda _: busy()
    here = await station(scripted_broker.url, batch_messages=10)
    ids = ids_of(100)
    await here.send(*ids)
    here.run()
    await scripted_broker.until(lambda: len(scripted_broker.batches) >= 5)
    await here.outbox.set_relay_control(None, paused=True, caller=Caller(0, 0), reason="test")
    await here.relay.controls_changed()
    await until(lambda: here.relay.status().state == "paused")
    while {row.status for row in await rows_of(here)} != {"pending"}:
        await here.clock.sleep(1)
    scripted_broker.judge = lambda items: [accepted(item) for item in items]
    await here.outbox.set_relay_control(None, paused=False, caller=Caller(0, 0), reason="test")
    await here.relay.controls_changed()
    assert {row.status for row in await here.settled(*ids)} == {"done"}


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


def test_a_token_file_that_becomes_a_pipe_while_it_is_read_holds_nothing_up(tmp_path: Path) -> None:
    file, fresh = tmp_path / "token", tmp_path / "fresh"
    file.write_text("first")
    ended = threading.Event()

    def read_again_and_again() -> None:
        for _ in range(2000):
            with suppress(RequestFailed):
                TokenFile(file).read()
        ended.set()

    threading.Thread(target=read_again_and_again, daemon=True).start()
    deadline = time.monotonic() + 60
    while not ended.is_set() and time.monotonic() < deadline:
        os.mkfifo(fresh, 0o600)
        fresh.replace(file)
        fresh.write_text("another")
        fresh.chmod(0o600)
        fresh.replace(file)
    assert ended.is_set()


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


async def is_pending(here):
    return [row.status for row in await rows_of(here)] == ["pending"]


@pytest.mark.parametrize("status", [503, 429])
@pytest.mark.parametrize("word", ["flush", "flush all", "resume", "resume a destination"])
async def test_an_operators_word_ends_any_pause_and_what_waited_goes_at_once(
    scripted_broker, station, answers, word, status
):
    accepted, _ = answers
    scripted_broker.judge = lambda _: whole(status, **{"Retry-After": "600"})
    here = await station(scripted_broker.url, speed=1)
    await here.send("a")
    here.run()
    await until(lambda: here.relay.status().state == "waiting")
    await until_so(lambda: is_pending(here))  # a moment after the pause began
    (row,) = await rows_of(here)
    scripted_broker.judge = lambda items: [accepted(item) for item in items]
    operator = {"caller": Caller(0, 0), "reason": "now"}
    match word:
        case "flush":
            await here.outbox.act("flush", row.id, **operator)
        case "flush all":
            await here.outbox.bulk("flush", RowFilter(status="pending"), **operator)
        case "resume":
            await here.outbox.set_relay_control(None, paused=False, **operator)
        case _:
            await here.outbox.set_relay_control("topic:orders", paused=False, **operator)
    assert [row.status for row in await here.settled("a")] == ["done"]


async def test_a_resume_leaves_alone_what_its_sender_wants_later_and_what_goes_elsewhere(scripted_broker, station):
    scripted_broker.judge = lambda _: whole(503, **{"Retry-After": "600"})
    here = await station(scripted_broker.url, speed=1)
    later = {"to": "topic:orders", "client_message_id": "later", "not_before": "2090-01-01T00:00:00Z"}
    await here.outbox.accept([prepare(json.dumps(later).encode())], Caller(0, 0))
    await here.send("elsewhere", to="topic:invoices")
    here.run()
    await until(lambda: here.relay.status().state == "waiting")
    posted = len(scripted_broker.batches)
    await here.outbox.set_relay_control("topic:orders", paused=False, caller=Caller(0, 0), reason="now")
    rows = {row.client_message_id: row for row in await rows_of(here)}
    assert rows["later"].next_attempt_at.year == 2090
    assert (rows["elsewhere"].next_attempt_at - rows["elsewhere"].enqueued_at).total_seconds() >= 600
    assert len(scripted_broker.batches) == posted


async def test_an_outage_of_half_a_minute_is_degraded_until_the_broker_is_back(scripted_broker, station, answers):
    accepted, _ = answers
    scripted_broker.judge = lambda _: whole(503)
    here = await station(scripted_broker.url, speed=100, backoff_most_seconds=1)
    await here.send("a")
    here.run()
    await until(lambda: here.relay.status().state == "waiting")
    assert not here.relay.status().degraded
    await until(lambda: here.relay.status().degraded)
    here.clock.jump(-24)
    assert not here.relay.status().degraded
    await until(lambda: here.relay.status().degraded)
    scripted_broker.judge = lambda items: [accepted(item) for item in items]
    await here.settled("a")
    assert not here.relay.status().degraded


async def test_a_busy_broker_is_no_outage(scripted_broker, station):
    scripted_broker.judge = lambda _: busy()
    here = await station(scripted_broker.url, speed=1000)
    await here.send("a")
    here.run()
    await scripted_broker.until(lambda: len(scripted_broker.batches) >= 100)
    assert not here.relay.status().degraded


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
    assert len([batch for batch in scripted_broker.batches if batch != [poison]]) < 40
    await until(lambda: here.relay.counters.attempts["failed"] >= 3)
    row = await here.outbox.row(poison)
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
