"""The relay on a real outbox, against a scripted broker over real HTTP: batches, and an answer for each message."""

from __future__ import annotations

from aiohttp import web
from support.relaying import FEATURES, ids_of
from support.waiting import until


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


async def test_what_comes_shortly_after_a_post_shares_the_next_one(scripted_broker, station):
    here = await station(scripted_broker.url, speed=0.0025)
    here.run()
    await here.send("a")
    await here.settled("a")
    await here.send("b")
    await here.clock.sleep(0.0005)
    await here.send("c")
    await here.settled("b", "c")
    assert scripted_broker.batches == [["a"], ["b", "c"]]


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
    posts = {one: (await here.outbox.inspect(one)).failed_posts for one in ids}
    assert {one: [each.code for each in posts[one]] for one in ids} == {
        "fine": [],
        "conflict": ["idempotency_key_reused"],
        "gone": ["topic_not_found"],
        "large": ["payload_too_large"],
        "limited": ["rate_limited"],
        "failed": ["database_down"],
        "twice": [],
    }
    assert {each.broker for found in posts.values() for each in found} == {scripted_broker.url}


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
    posted = [(await here.outbox.row(message_id)).attempts for message_id in scripted_broker.batches[0]]
    assert set(posted) == {0}
