"""What the broker's answers make of rows, and what becomes of rows that are too old."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.outboxes import START, WHY, Clock, accepted, dead, done, opened, retry, row_in, send
from support.waiting import until

from outbox import Outbox, Post, Settlement
from postroom._wire.sends import OutboxRow


async def found(outbox: Outbox, client_message_id: str = "id-1") -> OutboxRow:
    return await outbox.row(client_message_id)


async def watched(outbox: Outbox, row_id: str) -> asyncio.Future[None]:
    """Begin to wait for a row, and return once that has begun."""
    waiting = asyncio.ensure_future(outbox.wait_all([row_id], 600))
    await until(lambda: row_id in outbox._watchers._events, pause=0)
    return waiting


async def test_an_accepted_message_is_done(outbox: Outbox, clock: Clock) -> None:
    row_id = await row_in(outbox, "inflight")
    clock.forward(2)
    assert await outbox.settle([done(row_id)]) == 1
    row = await found(outbox)
    assert (row.status, row.broker_message_id, row.history_id, row.attempts) == ("done", "BROKER-1", 7, 1)
    assert row.delivered_at is not None
    assert row.delivered_at.timestamp() * 1000 == clock.now


async def test_a_refused_message_is_dead_with_its_reason(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "inflight")
    assert await outbox.settle([dead(row_id, "topic_not_found: no 'topic' \"orders\"\n")]) == 1
    row = await found(outbox)
    assert (row.status, row.last_error, row.attempts) == ("dead", "topic_not_found: no 'topic' \"orders\"\n", 1)


async def test_a_delayed_message_is_due_again_later(outbox: Outbox, clock: Clock) -> None:
    row_id = await row_in(outbox, "inflight")
    await outbox.settle([retry(row_id, 500)])
    row = await found(outbox)
    assert (row.status, row.attempts, row.last_error) == ("pending", 1, "unavailable: the broker is away")
    assert await outbox.claim() == []
    clock.forward(0.5)
    assert [row.attempts for row in await outbox.claim()] == [1]


async def test_an_outage_burns_no_attempt(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "inflight")
    await outbox.settle([retry(row_id, burns_attempt=False)])
    assert (await found(outbox)).attempts == 0


async def test_a_patient_settlement_goes_with_a_send_unless_somebody_waits_for_a_row(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.outbox._PATIENCE_SECONDS", 600)
    row_id = await row_in(outbox, "inflight")
    waiting = await watched(outbox, row_id)
    await outbox.settle([retry(row_id)], patient=True)
    waiting.cancel()
    await asyncio.wait([waiting])
    await outbox.claim()
    before, _ = outbox.progress
    settling = asyncio.ensure_future(outbox.settle([done(row_id)], patient=True))
    await asyncio.sleep(0)
    await accepted(outbox, send("id-2"))
    assert (await settling, outbox.progress[0] - before, (await found(outbox)).status) == (1, 1, "done")


async def test_one_settlement_holds_answers_of_every_kind(outbox: Outbox) -> None:
    await accepted(outbox, send("a"), send("b"), send("c"))
    a, b, c = await outbox.claim()
    assert await outbox.settle([retry(c.row_id), done(a.row_id), dead(b.row_id)]) == 3
    assert [(await found(outbox, each)).status for each in "abc"] == ["done", "dead", "pending"]
    assert (await outbox.counts()).rows == {"pending": 1, "inflight": 0, "done": 1, "dead": 1, "aborted": 0}


@pytest.mark.parametrize("wait_ms", [0, 500])
async def test_a_retry_is_due_by_the_clock_of_the_moment_it_is_settled(
    outbox: Outbox, clock: Clock, wait_ms: int
) -> None:
    await accepted(outbox, send("now"), send("later", not_before=START + 60_000))
    clock.forward(10**9)  # wrong, for a moment: both are claimed
    claimed = await outbox.claim()
    clock.forward(-(10**9))
    await outbox.settle([retry(row.row_id, wait_ms) for row in claimed])
    due = [await found(outbox, name) for name in ("now", "later")]
    assert [row.next_attempt_at.timestamp() * 1000 for row in due] == [START + wait_ms, START + 60_000]
    clock.forward(1)
    assert [row.client_message_id for row in await outbox.claim()] == ["now"]


@pytest.mark.parametrize("status", ["pending", "done", "dead", "aborted"])
@pytest.mark.parametrize("answer", [done, dead, retry], ids=["done", "dead", "retry"])
async def test_only_an_inflight_row_is_settled(outbox: Outbox, status: str, answer: object) -> None:
    row_id = await row_in(outbox, status)
    before = await found(outbox)
    settlement: Settlement = answer(row_id)  # type: ignore[operator]
    assert await outbox.settle([settlement, done("no such row")]) == 0
    assert await found(outbox) == before


async def test_failed_posts_are_kept_and_those_that_failed_alike_are_one_entry(outbox: Outbox, clock: Clock) -> None:
    row_id = await row_in(outbox, "inflight")
    for code, broker in [("busy", "a"), ("busy", "a"), ("busy", "b"), ("gone", "b"), ("busy", "b")]:
        settlement = retry(row_id)._replace(last_error=f"{code}: not now")
        await outbox.settle([settlement], Post(clock.now, 250, f"https://{broker}"))
        clock.forward(1)
        await outbox.claim()
    await outbox.settle([done(row_id)], Post(clock.now, 3, "https://b"))
    found = [
        (
            posts.code,
            posts.broker,
            posts.times,
            posts.since.timestamp() - START / 1000,
            posts.at.timestamp() - START / 1000,
        )
        for posts in (await outbox.inspect(row_id)).failed_posts
    ]
    assert found == [
        ("busy", "https://a", 2, 0, 1),
        ("busy", "https://b", 1, 2, 2),
        ("gone", "https://b", 1, 3, 3),
        ("busy", "https://b", 1, 4, 4),
    ]
    assert (await outbox.inspect(row_id)).failed_posts[0].seconds == 0.25


async def test_of_failed_posts_the_last_twenty_kinds_are_kept_until_the_row_moves(
    outbox: Outbox, clock: Clock, database: Path
) -> None:
    row_id = await row_in(outbox, "inflight")
    for number in range(25):
        settlement = retry(row_id)._replace(last_error=f"busy_{number}: not now")
        await outbox.settle([settlement], Post(clock.now, 1, "https://a"))
        await outbox.claim()
    await outbox.settle([done(row_id)])
    codes = [posts.code for posts in (await outbox.inspect(row_id)).failed_posts]
    assert codes == [f"busy_{number}" for number in range(5, 25)]
    await row_in(outbox, "pending", "id-2")
    await outbox.prune(clock.now + 1, **WHY)
    assert (await outbox.inspect(row_id)).failed_posts == []
    with opened(database) as db:
        assert db.execute("SELECT count(*) FROM outbox_failed_posts").fetchone() == (0,)


async def test_a_row_that_is_accepted_at_its_first_post_costs_nothing_more(outbox: Outbox, clock: Clock) -> None:
    row_id = await row_in(outbox, "inflight")
    statements: list[str] = []
    await outbox._store.run(lambda db: db.set_trace_callback(statements.append))
    await outbox.settle([done(row_id)], Post(clock.now, 3, "https://a"))
    await outbox._store.run(lambda db: db.set_trace_callback(None))
    assert any("broker_message_id" in each for each in statements)
    assert [each for each in statements if "failed_posts" in each or "unreported" in each] == []


async def test_what_is_not_inflight_any_more_gets_no_failed_post(outbox: Outbox, clock: Clock) -> None:
    row_id = await row_in(outbox, "dead")
    await outbox.settle([retry(row_id)], Post(clock.now, 1, "https://a"))
    assert (await outbox.inspect(row_id)).failed_posts == []


async def test_waiting_for_a_send_ends_when_it_settles(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "inflight")
    waiting = await watched(outbox, row_id)
    await outbox.settle([done(row_id)])
    await asyncio.wait_for(waiting, 30)
    assert (await found(outbox)).status == "done"


@pytest.mark.parametrize("verb", ["abort", "requeue"])
async def test_waiting_for_a_send_ends_when_an_operator_retires_it(outbox: Outbox, verb: str) -> None:
    row_id = await row_in(outbox, "pending")
    waiting = await watched(outbox, row_id)
    await outbox.act(verb, row_id, **WHY)
    await asyncio.wait_for(waiting, 30)
    assert (await found(outbox)).status == "aborted"


async def test_waiting_leaves_the_row_as_it_is(outbox: Outbox) -> None:
    await outbox.wait_all([await row_in(outbox, "pending")], 0)
    assert (await found(outbox)).status == "pending"
    assert outbox._watchers._events == {}


async def test_a_settled_send_is_not_waited_for(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "dead")
    await asyncio.wait_for(outbox.wait_all([row_id], 600), 30)


async def test_a_row_that_is_sent_again_grows_old_from_then_on_and_keeps_its_not_before(
    outbox: Outbox, clock: Clock
) -> None:
    await accepted(outbox, send("prompt"), send("later", not_before=START + 1000))
    clock.forward(10)
    ids = [row.row_id for row in await outbox.claim()]
    await outbox.settle([done(row_id) for row_id in ids])
    await outbox.begin_comparison("restored", START)
    comparison = await outbox.comparison()
    assert comparison is not None
    lost, last = await outbox.stretch(comparison)
    await outbox.note_compared(comparison, last, found=[], lost=lost)
    clock.forward(90)
    assert (await outbox.resend_missing(**WHY)).row_ids == ids
    assert [(await found(outbox, name)).not_before for name in ("prompt", "later")] == [
        None,
        datetime.fromtimestamp(START / 1000 + 1, UTC),
    ]
    assert {row.age_from for row in await outbox.claim()} == {clock.now}
    await outbox.settle([retry(row_id) for row_id in ids])
    assert await outbox.expire(clock.now) == 0
    assert (await outbox.act("requeue", ids[0], **WHY)).not_before is None
    assert await outbox.expire(clock.now + 1) == 2


async def test_pending_rows_that_are_too_old_die(outbox: Outbox, clock: Clock) -> None:
    await accepted(outbox, send("waiting"))
    (waiting,) = await outbox.claim()
    await outbox.settle([retry(waiting.row_id, 10**9)])
    await accepted(outbox, send("held"), send("low", priority="low"))
    held = await found(outbox, "held")
    await outbox.act("hold", held.id, **WHY)
    await row_in(outbox, "pending", "due")
    clock.forward(1)
    await accepted(outbox, send("young"))
    assert await outbox.expire(START) == 0
    assert await outbox.expire(START + 1) == 4
    for name in ("held", "waiting", "low", "due"):
        row = await found(outbox, name)
        assert row.status == "dead"
        assert (row.last_error or "").startswith("expired: ")
        assert not row.held
    assert (await found(outbox, "young")).status == "pending"


async def test_a_row_is_no_older_than_the_process_that_accepted_it_unless_a_post_of_it_got_no_answer(
    state: Path, clock: Clock
) -> None:
    now, day = clock(), 24 * 3_600_000
    async with await Outbox.open(state, clock=clock, steady_clock=lambda: 0) as outbox:
        await accepted(outbox, send("earlier"))
    async with await Outbox.open(state, clock=clock, steady_clock=lambda: 0) as outbox:
        await accepted(outbox, send("unanswered"), send("waits"))
        _, unanswered, waits = await outbox.claim()
        await outbox.settle([retry(unanswered.row_id)._replace(answered=False), retry(waits.row_id)])
        clock.forward(40 * 24 * 3600)  # it was behind, and is set; no time has passed
        assert [row.age_from for row in await outbox.claim()] == [now, now + 40 * day]
        await outbox.settle([retry(row.row_id)._replace(answered=None) for row in (unanswered, waits)])
        assert await outbox.expire(now + 13 * day) == 1
        assert [(await outbox.row(name)).status for name in ("unanswered", "waits")] == ["dead", "pending"]
    async with await Outbox.open(state, clock=clock, steady_clock=lambda: 0) as outbox:
        assert await outbox.expire(now + 13 * day) == 2


@pytest.mark.parametrize("claimed", [False, True])
async def test_whether_the_broker_has_a_row_that_expired_unanswered_stays_unknown(
    outbox: Outbox, *, claimed: bool
) -> None:
    row_id = await row_in(outbox, "inflight")
    await outbox.settle([retry(row_id)._replace(answered=False)])
    if claimed:
        await outbox.claim()
        await outbox.settle([dead(row_id, "expired: it is too old")._replace(answered=None)])
    else:
        await outbox.expire(START + 1)
    row = await found(outbox)
    assert (row.status, row.unanswered_at is None) == ("dead", False)


async def test_the_age_of_a_row_counts_from_its_not_before(outbox: Outbox, clock: Clock) -> None:
    await accepted(
        outbox, send("later", not_before=START + 60_000), send("now"), send("past", not_before=START - 60_000)
    )
    assert await outbox.expire(START) == 0
    assert await outbox.expire(START + 1) == 2
    assert await outbox.expire(START + 60_000) == 0
    clock.forward(60)
    assert [row.client_message_id for row in await outbox.claim()] == ["later"]
    await outbox.settle([retry((await found(outbox, "later")).id)])
    assert await outbox.expire(START + 60_001) == 1
    assert (await found(outbox, "later")).status == "dead"


@pytest.mark.parametrize("due", [False, True], ids=["waiting", "due"])
async def test_rows_that_were_meant_for_later_hide_no_expired_row(outbox: Outbox, clock: Clock, *, due: bool) -> None:
    await accepted(outbox, *(send(f"later-{number}", not_before=START + 60_000) for number in range(1200)))
    await accepted(outbox, send("old"))
    (old,) = await outbox.claim()
    if due:
        clock.forward(60)
        for _ in range(3):  # each wakes 500
            assert await outbox.claim(excluded={"topic:orders"}) == []
    await outbox.settle([retry(old.row_id, 0 if due else 120_000)])
    assert await outbox.expire(START + 1) == 1
    assert (await found(outbox, "old")).status == "dead"
    assert (await outbox.counts()).rows["pending"] == 1200


async def test_an_inflight_row_does_not_expire(outbox: Outbox) -> None:
    await row_in(outbox, "inflight")
    assert await outbox.expire(START * 2) == 0


async def test_a_backlog_expires_in_several_transactions(outbox: Outbox, clock: Clock) -> None:
    await accepted(outbox, *(send(f"id-{number}") for number in range(1200)))
    transactions, _ = outbox.progress
    assert await outbox.expire(clock.now + 1) == 1200
    assert outbox.progress[0] - transactions >= 3
    assert (await outbox.counts()).rows["dead"] == 1200
