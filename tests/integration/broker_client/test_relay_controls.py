"""What operators tell the relay: pauses and rates."""

from __future__ import annotations

import pytest
from support.relaying import ids_of
from support.waiting import until

from outbox.model import Caller

ME = Caller(0, 0)
HOUR = 3600  # seconds


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
