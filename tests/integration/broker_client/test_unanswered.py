"""A row that was posted and not answered for: an operator's verb asks the broker for it before it retires it."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace
from support.relaying import rows_of, whole

from broker_client.channel import Channel
from outbox import Caller, RowFilter
from postroom.errors import Conflict

WHY: dict[str, Any] = {"caller": Caller(0, 0), "reason": "it hung"}


def losing(broker: Any, *, accepting: bool) -> None:
    """Let the broker accept, or not, and its answer be lost on the way."""

    def judge(items: list[dict[str, Any]]) -> web.Response:
        if accepting:
            broker.done += [item["client_message_id"] for item in items]
        return web.Response(status=502)

    broker.judge = judge


async def leads_to(here: Any, url: str) -> None:
    """Have the next requests go to `url`, over new connections."""
    await here.link._channel.close()
    here.link._channel = Channel(replace(here.link._channel._settings, url=url))


async def posted_unanswered(here: Any, broker: Any, *ids: str) -> None:
    """Post these rows once, without an answer, and stop relaying."""
    await here.outbox.set_relay_control(None, paused=False, **WHY)
    await here.send(*ids)
    here.run()
    await broker.until(lambda: broker.batches)
    await here.relay.stop()


@pytest.mark.parametrize("verb", ["requeue", "abort"])
async def test_what_the_broker_has_is_done_and_the_verb_says_so(station: Any, scripted_broker: Any, verb: str) -> None:
    here = await station(scripted_broker.url)
    losing(scripted_broker, accepting=True)
    await posted_unanswered(here, scripted_broker, "a")
    (row,) = await rows_of(here)
    assert (row.status, row.unanswered_at is None) == ("pending", False)

    with pytest.raises(Conflict, match="the row is done now") as refusal:
        await here.outbox.act(verb, "a", **WHY)
    assert refusal.value.code == "already_accepted"
    (row,) = await rows_of(here)
    assert (row.status, row.duplicate, row.unanswered_at) == ("done", True, None)
    assert (await here.outbox.counts()).rows["done"] == 1
    assert (await here.outbox.inspect("a")).log == []


@pytest.mark.parametrize("status", [403, 404, 408, 413, 429])
async def test_what_a_proxy_answers_in_place_of_the_broker_leaves_the_outcome_unknown(
    station: Any, scripted_broker: Any, status: int
) -> None:
    def judge(items: list[dict[str, Any]]) -> web.Response:
        scripted_broker.done += [item["client_message_id"] for item in items]
        return web.Response(status=status, text="<h1>The answer was held back</h1>")

    scripted_broker.judge = judge
    here = await station(scripted_broker.url)
    await posted_unanswered(here, scripted_broker, "a")
    with pytest.raises(Conflict, match="the row is done now") as refusal:
        await here.outbox.act("requeue", "a", **WHY)
    assert refusal.value.code == "already_accepted"


@pytest.mark.parametrize("verb", ["requeue", "abort"])
async def test_what_the_broker_has_not_is_retired(station: Any, scripted_broker: Any, verb: str) -> None:
    here = await station(scripted_broker.url)
    losing(scripted_broker, accepting=False)
    await posted_unanswered(here, scripted_broker, "a")
    await here.outbox.act(verb, "a", **WHY)
    assert (await here.outbox.row("a")).status == "aborted"


@pytest.mark.parametrize("verb", ["requeue", "abort"])
async def test_while_the_broker_cannot_be_asked_only_force_retires_and_the_log_keeps_it(
    station: Any, scripted_broker: Any, verb: str
) -> None:
    here = await station(scripted_broker.url)
    losing(scripted_broker, accepting=True)
    await posted_unanswered(here, scripted_broker, "a", "b")
    await here.outbox.act("hold", "b", **WHY)  # other verbs ask nobody
    await leads_to(here, "http://127.0.0.1:1")  # where nobody listens
    with pytest.raises(Conflict, match=r"cannot connect to .*or force it") as refusal:
        await here.outbox.act(verb, "a", **WHY)
    assert refusal.value.code == "outcome_unknown"
    assert (await here.outbox.row("a")).status == "pending"

    await here.outbox.act(verb, "a", force=True, **WHY)
    (line,) = (await here.outbox.inspect("a")).log
    assert (line.verb, "forced: the broker may have accepted it" in line.detail) == (verb, True)


async def test_force_does_not_override_what_the_broker_says(station: Any, scripted_broker: Any) -> None:
    here = await station(scripted_broker.url)
    losing(scripted_broker, accepting=True)
    await posted_unanswered(here, scripted_broker, "a")
    with pytest.raises(Conflict) as refusal:
        await here.outbox.act("requeue", "a", force=True, **WHY)
    assert refusal.value.code == "already_accepted"


async def test_rows_that_were_never_posted_or_were_refused_are_asked_for_nowhere(
    station: Any, scripted_broker: Any, answers: Any
) -> None:
    _, refused = answers
    here = await station(scripted_broker.url)
    await here.send("never")
    await here.outbox.act("requeue", "never", **WHY)
    losing(scripted_broker, accepting=False)
    await here.send("refused")
    here.run()
    await scripted_broker.until(lambda: scripted_broker.batches)
    scripted_broker.judge = lambda items: [refused(item, 404) for item in items]
    await here.settled("refused")
    await here.relay.stop()
    await here.outbox.act("requeue", "refused", **WHY)
    assert scripted_broker.asked == []


async def test_a_row_that_expired_unanswered_is_asked_for(station: Any, scripted_broker: Any) -> None:
    here = await station(scripted_broker.url)
    losing(scripted_broker, accepting=True)
    await posted_unanswered(here, scripted_broker, "a")
    here.clock.jump(1000)
    assert await here.outbox.expire(here.clock.now_ms() - 3_600_000) == 1
    assert (await here.outbox.row("a")).last_error.startswith("expired")
    with pytest.raises(Conflict) as refusal:
        await here.outbox.act("requeue", "a", **WHY)
    assert refusal.value.code == "already_accepted"
    assert (await here.outbox.row("a")).status == "done"


async def test_a_row_that_was_claimed_when_the_daemon_died_is_asked_for(station: Any, scripted_broker: Any) -> None:
    here = await station(scripted_broker.url)
    await here.send("a", "b")
    await here.outbox.claim()
    scripted_broker.done.append("a")
    await here.end()  # nothing was settled
    here = await station(scripted_broker.url)
    with pytest.raises(Conflict) as refusal:
        await here.outbox.act("abort", "a", **WHY)
    assert refusal.value.code == "already_accepted"
    assert (await here.outbox.act("abort", "b", **WHY)).status == "aborted"


async def test_a_post_that_a_stop_broke_off_is_asked_for(station: Any, scripted_broker: Any) -> None:
    here = await station(scripted_broker.url, stop_seconds=0.001)
    scripted_broker.gate.clear()
    await here.send("a")
    here.run()
    await scripted_broker.until(lambda: scripted_broker.batches)
    await here.relay.stop()
    assert (await here.outbox.row("a")).unanswered_at is not None


async def test_rows_that_a_pause_gave_back_unposted_are_not_unanswered(station: Any, scripted_broker: Any) -> None:
    here = await station(scripted_broker.url, batch_messages=1, posts_at_once=1)
    scripted_broker.judge = lambda _: whole(401)
    await here.send(*"abc")
    here.run()
    await scripted_broker.until(lambda: scripted_broker.batches)
    await here.relay.stop()
    assert [row.unanswered_at for row in await rows_of(here)] == [None] * 3


async def test_a_bulk_verb_asks_for_each_and_tells_them_apart(station: Any, scripted_broker: Any) -> None:
    here = await station(scripted_broker.url)
    losing(scripted_broker, accepting=False)
    await posted_unanswered(here, scripted_broker, *"abc")
    await here.send("d")
    scripted_broker.done.append("b")
    dry = await here.outbox.bulk("requeue", RowFilter(status="pending"), dry_run=True, **WHY)
    assert (len(dry.done), scripted_broker.asked) == (4, [])

    result = await here.outbox.bulk("requeue", RowFilter(status="pending"), **WHY)
    ids = {row.client_message_id: row for row in await rows_of(here)}
    assert scripted_broker.asked == [["a", "b", "c"]]
    assert sorted(result.done) == sorted(ids[one].id for one in "acd")
    assert [(each.id, each.code) for each in result.failed] == [(ids["b"].id, "already_accepted")]
    assert [ids[one].status for one in "abcd"] == ["aborted", "done", "aborted", "aborted"]


async def test_a_bulk_verb_leaves_what_it_cannot_ask_for(station: Any, scripted_broker: Any) -> None:
    here = await station(scripted_broker.url)
    losing(scripted_broker, accepting=True)
    await posted_unanswered(here, scripted_broker, *"ab")
    await here.send("c")
    await leads_to(here, "http://127.0.0.1:1")
    for rows in (RowFilter(ids=list("abc")), RowFilter(status="pending")):
        result = await here.outbox.bulk("abort", rows, **WHY)
        assert [each.code for each in result.failed] == ["outcome_unknown"] * 2
    forced = await here.outbox.bulk("abort", RowFilter(status="pending"), force=True, **WHY)
    assert (len(forced.done), forced.failed) == (2, [])


@pytest.mark.parametrize("status", [404, 500, 503])
async def test_a_broker_that_will_not_say_leaves_it_unknown(station: Any, scripted_broker: Any, status: int) -> None:
    here = await station(scripted_broker.url)
    losing(scripted_broker, accepting=True)
    await posted_unanswered(here, scripted_broker, "a")

    async def silent(_: web.Request) -> web.Response:
        return web.Response(status=status)

    app = web.Application()
    app.router.add_post("/v1/accepted", silent)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await leads_to(here, f"http://127.0.0.1:{runner.addresses[0][1]}")
    with pytest.raises(Conflict) as refusal:
        await here.outbox.act("requeue", "a", **WHY)
    assert refusal.value.code == "outcome_unknown"
    await runner.cleanup()
