"""The relay on a real outbox, against a scripted broker over real HTTP."""

from __future__ import annotations


async def test_a_backlog_is_relayed_in_batches_and_settled(scripted_broker, station):
    here = await station(scripted_broker.url)
    ids = [f"id-{n}" for n in range(1200)]
    await here.send(*ids)
    here.run()
    rows = await here.settled(*ids)
    assert {row.status for row in rows} == {"done"}
    assert sorted(scripted_broker.done) == sorted(ids)
    assert max(map(len, scripted_broker.batches)) == 500
    assert here.relay.status().state == "relaying"
