"""A clock that is wrong, for a moment or for good: nothing dies of it, and nothing waits for ever."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import pytest
from support.relaying import ids_of, rows_of, whole
from support.waiting import until

from broker_client.link import ConfirmedClock
from outbox.model import Caller

YEARS = 10 * 365 * 24  # hours
FORTY_DAYS = 40 * 24
OPERATOR = Caller(0, 0)
DAY = 24 * 3_600_000  # ms
MARGIN = 72 * 3_600_000


@pytest.fixture
def rows():
    return ids_of(300)


async def sent(scripted_broker, answers):
    accepted, _ = answers
    scripted_broker.judge = lambda items: [accepted(item) for item in items]


@pytest.mark.parametrize("hours", [FORTY_DAYS, YEARS, -YEARS, -FORTY_DAYS])
async def test_a_clock_that_is_wrong_for_a_moment_kills_nothing_and_delays_nothing(
    scripted_broker, station, answers, rows, hours
):
    scripted_broker.judge = lambda _: whole(503)
    here = await station(scripted_broker.url, expiry_seconds=1, backoff_most_seconds=1)
    scripted_broker.date = None  # the answers of an outage come from somebody else
    await here.send(*rows)
    here.run()
    await until(lambda: here.relay.status().state == "waiting")
    here.clock.jump(hours)
    await here.send("meanwhile")
    await here.clock.sleep(60)  # in which it looks for expired rows again and again
    here.clock.jump(-hours)
    await here.clock.sleep(60)  # in which it looks for expired rows again and again
    assert {row.status for row in await rows_of(here)} <= {"pending", "inflight"}
    scripted_broker.date = here.clock.now_ms
    await sent(scripted_broker, answers)
    assert {row.status for row in await here.settled(*rows, "meanwhile")} == {"done"}


@pytest.mark.parametrize("hours", [YEARS, -YEARS])
async def test_what_a_restored_database_should_have_is_reckoned_by_the_brokers_clock(
    scripted_broker, station, answers, hours
):
    here = await station(scripted_broker.url, speed=1)
    await sent(scripted_broker, answers)
    here.run()
    await here.send("forgotten")
    await here.settled("forgotten")
    here.clock.jump(FORTY_DAYS)
    await here.send("recognised")
    await here.settled("recognised")

    scripted_broker.date = lambda: here.clock.now_ms() - hours * 3_600_000
    here.clock.jump(hours)
    await here.relay.comparison.begin("restored", await here.link.features())
    rows, _ = await here.outbox.stretch(await here.outbox.comparison())
    assert [row.client_message_id for row in rows] == ["recognised"]


async def test_a_post_that_fails_behind_a_clock_that_was_ahead_when_another_did_is_repeated_soon(
    scripted_broker, station, answers
):
    scripted_broker.judge = lambda _: whole(503)
    here = await station(scripted_broker.url, batch_messages=1, backoff_most_seconds=1)
    scripted_broker.date = None  # the answers of an outage come from somebody else
    here.run()
    gates = []
    for posts, name in enumerate(("ahead", "behind"), start=1):
        scripted_broker.gate = asyncio.Event()
        gates.append(scripted_broker.gate)
        await here.send(name)
        await scripted_broker.until(lambda posts=posts: len(scripted_broker.batches) == posts)
    ahead, behind = gates
    here.clock.jump(YEARS)
    ahead.set()
    await until(lambda: here.relay.status().state == "waiting")
    here.clock.jump(-YEARS)
    behind.set()
    await until(lambda: here.relay.counters.batches["broker_failed"] >= 2)
    scripted_broker.date = here.clock.now_ms
    await sent(scripted_broker, answers)
    assert {row.status for row in await here.settled("ahead", "behind")} == {"done"}


@pytest.mark.parametrize("hours", [FORTY_DAYS, YEARS, -YEARS])
async def test_a_clock_that_stays_wrong_stops_nothing_where_the_broker_tells_the_time(
    scripted_broker, station, answers, rows, hours
):
    await sent(scripted_broker, answers)
    here = await station(scripted_broker.url, expiry_seconds=1)
    right = here.clock.now_ms
    scripted_broker.date = lambda: right() - round(jumped * 3_600_000)
    jumped = 0
    await here.send(*rows)
    jumped = hours
    here.clock.jump(hours)
    here.run()
    await here.send("meanwhile")
    assert {row.status for row in await here.settled(*rows, "meanwhile")} == {"done"}


@pytest.mark.parametrize("at_the_start", [False, True])
async def test_a_clock_that_is_ahead_posts_nothing_before_its_not_before(
    scripted_broker, station, answers, at_the_start
):
    await sent(scripted_broker, answers)
    here = await station(scripted_broker.url, expiry_seconds=1)
    right, jumped = here.clock.now_ms, 0
    scripted_broker.date = lambda: right() - round(jumped * 3_600_000)
    if not at_the_start:
        here.run()
        await here.send("before")
        await here.settled("before")
    await here.send("later", not_before=datetime.fromtimestamp(right() / 1000 + 7 * 86_400, UTC).isoformat())
    jumped = YEARS
    here.clock.jump(YEARS)
    if at_the_start:
        here.run()
    await here.send("meanwhile")
    assert {row.status for row in await here.settled("meanwhile")} == {"done"}
    await here.clock.sleep(60)
    assert "later" not in [name for batch in scripted_broker.batches for name in batch]
    jumped = 0
    here.clock.jump(8 * 24 - YEARS)
    assert {row.status for row in await here.settled("later")} == {"done"}


async def test_without_a_date_what_looks_too_old_is_neither_posted_nor_dead_until_the_clock_is_right(
    scripted_broker, station, answers, rows
):
    await sent(scripted_broker, answers)
    here = await station(scripted_broker.url, expiry_seconds=1)
    scripted_broker.date = None
    await here.send(*rows)
    here.clock.jump(FORTY_DAYS)
    here.run()
    await until(lambda: here.relay.status().state == "relaying")
    await here.clock.sleep(60)
    found = await rows_of(here)
    assert {row.status for row in found} <= {"pending", "inflight"}
    assert scripted_broker.batches == []
    here.clock.jump(-FORTY_DAYS)
    assert {row.status for row in await here.settled(*rows)} == {"done"}


async def test_a_clock_that_the_broker_agrees_with_expires(scripted_broker, station, answers, rows):
    await sent(scripted_broker, answers)
    here = await station(scripted_broker.url, expiry_seconds=1)
    await here.send(*rows)
    here.clock.jump(FORTY_DAYS)
    here.run()
    assert {row.status for row in await here.settled(*rows)} == {"dead"}
    assert scripted_broker.batches == []


async def test_what_is_held_expires_too_though_there_is_nothing_to_post(scripted_broker, station, answers):
    await sent(scripted_broker, answers)
    here = await station(scripted_broker.url, speed=100_000, expiry_seconds=3600)
    await here.send("held")
    row = await here.outbox.row("held")
    await here.outbox.act("hold", row.id, caller=OPERATOR, reason="test")
    here.run()
    await until(lambda: here.relay.status().state == "relaying")
    here.clock.jump(FORTY_DAYS)
    assert [row.status for row in await here.settled("held")] == ["dead"]


async def test_a_start_with_a_clock_years_behind_dates_rows_no_earlier_than_the_last_one(
    scripted_broker, station, answers
):
    here = await station(scripted_broker.url)
    await here.send("before")
    before = await here.outbox.row("before")
    await here.end()
    again = await station(scripted_broker.url)
    again.clock.jump(-YEARS)
    await again.send("wrong")
    wrong = await again.outbox.row("wrong")
    assert wrong.enqueued_at >= before.enqueued_at  # later where the start itself took its time by the right clock
    again.clock.jump(YEARS)
    await sent(scripted_broker, answers)
    again.run()
    assert {row.status for row in await again.settled("before", "wrong")} == {"done"}


async def test_a_first_start_with_a_clock_years_behind_dates_rows_no_earlier_than_the_program(
    scripted_broker, station, answers
):
    here = await station(scripted_broker.url, earliest=1_795_219_200_000)
    here.clock.jump(-YEARS)
    await here.send("first", "second")
    here.clock.jump(YEARS)
    await sent(scripted_broker, answers)
    here.run()
    assert {row.status for row in await here.settled("first", "second")} == {"done"}


async def test_what_a_host_accepts_before_its_clock_is_set_does_not_expire_when_it_is(
    scripted_broker, station, answers
):
    """It was off for longer than max_age, and its clock goes on where it stopped; so does the date of the last row."""
    here = await station(scripted_broker.url, steady=True)
    here.clock.jump(-FORTY_DAYS)
    await here.send("first", "second")
    here.clock.jump(FORTY_DAYS)
    await sent(scripted_broker, answers)
    here.run()
    assert {row.status for row in await here.settled("first", "second")} == {"done"}


@pytest.mark.parametrize("hours", [YEARS, -YEARS])
async def test_the_time_to_delete_by_waits_for_an_answer_that_agrees_with_the_clock(scripted_broker, station, hours):
    here = await station(scripted_broker.url)
    right = here.clock.now_ms
    scripted_broker.date = lambda: right() - round(jumped * 3_600_000)
    jumped = hours
    here.clock.jump(hours)
    asked = asyncio.create_task(here.link.confirmed_time())
    await here.link.features()
    here.clock.jump(-hours)
    jumped = 0
    await asyncio.sleep(0)
    assert not asked.done()  # the last answer and the clock are years apart
    await here.link.features()
    assert abs(await asked - right()) < DAY


@pytest.mark.parametrize(
    ("date", "agrees"),
    [
        ("Sat, 21 Nov 2026 00:00:00 GMT", True),
        ("Wed, 18 Nov 2026 00:00:00 GMT", True),
        ("Tue, 24 Nov 2026 00:00:01 GMT", False),
        ("Sun, 21 Nov 2016 00:00:00 GMT", False),
        ("yesterday", False),
        ("", False),
        (None, False),
    ],
)
def test_a_clock_is_confirmed_by_a_date_within_the_margin(date, agrees):
    now = 1_795_219_200_000
    clock = ConfirmedClock()
    clock.answered(date, now)
    assert clock.is_confirmed(now, MARGIN) is agrees


def test_a_clock_knows_how_far_it_is_from_the_brokers():
    clock = ConfirmedClock()
    assert clock.ahead_ms is None
    clock.answered("Sat, 21 Nov 2026 00:00:00 GMT", 1_795_219_200_000 + 90_000)
    assert clock.ahead_ms == 90_000


def test_an_answer_confirms_for_as_long_as_the_margin_and_not_a_clock_that_goes_back():
    now = 1_795_219_200_000
    clock = ConfirmedClock()
    clock.answered("Sat, 21 Nov 2026 00:00:00 GMT", now)
    assert clock.is_confirmed(now + MARGIN, MARGIN)
    assert not clock.is_confirmed(now + MARGIN + 1, MARGIN)
    assert not clock.is_confirmed(now - 1, MARGIN)
    assert clock.is_stale(now - 1, MARGIN)
