"""What the broker says of itself at the start, and how old a row may become."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.relaying import FEATURES
from support.waiting import until

from outbox.model import Caller
from postroom._wire.message import prepare
from postroom.chassis.exits import Exit, Fatal

ME = Caller(0, 0)
HOUR = 3600  # seconds


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
        {"client_message_id_dedupe": FEATURES["client_message_id_dedupe"] | {"mode": "exactly_once"}},
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
    here = await station(scripted_broker.url, max_age_hours=800)
    here.run()
    with pytest.raises(Fatal, match=r"relay\.max_age_hours is 800"):
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
    assert "is for the mesh 'other'" in (here.relay.status().reason or "")
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
    await here.send("young")
    async with TestServer(scripted_broker.application(), port=unused_tcp_port):
        old, young = await here.settled("old", "young")
    assert (old.status, young.status) == ("dead", "done")
    assert old.last_error.startswith("expired: ")
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
