"""How quickly things go: by the last two reports of each program, and of all together."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec.structs import replace

from cli.installation import Sight
from cli.top import summary
from postroom._wire.programs import Program, Rates

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


def program(kind: Any, seconds: float, **fields: Any) -> Program:
    at = BEGAN + timedelta(seconds=seconds)
    names = {"name": "x", "host": "red", "pid": 1, "version": "1", "address": "/a", "status": "ok"}
    times = {"started_at": BEGAN, "at": at, "reported_at": at, "clock_seconds": 0.0}
    return Program(kind=kind, mesh="demo" if kind == "daemon" else None, **{**names, **times, **fields})


def test_there_is_no_rate_before_the_second_report() -> None:
    rates = Rates()
    for _ in range(2):  # the same report, seen twice
        rates.see([program("broker", 10, totals={"accepted": 100})])
        assert rates.of("accepted") is None


def test_a_rate_is_between_two_reports_and_stays_until_the_next() -> None:
    rates = Rates()
    second = program("broker", 20, totals={"accepted": 150})
    for one in (program("broker", 10, totals={"accepted": 100}), second, second):
        rates.see([one])
    assert rates.of("accepted") == 5


def test_rates_of_several_programs_are_added_and_what_waits_may_sink() -> None:
    rates = Rates()
    rates.see([program("worker", 10, totals={"handled": 0}), program("daemon", 10, waiting=40, dead=0)])
    now = [
        program("worker", 20, totals={"handled": 20}),
        program("worker", 20, host="blue", totals={"handled": 7}),  # its first
        program("daemon", 20, waiting=10, dead=1),
    ]
    rates.see(now)
    assert (rates.of("handled"), rates.of("waiting"), rates.of("dead")) == (2, -3, 0.1)
    assert summary(Sight(programs=now), rates) == (
        "queued -  accepted -  published -  handled 2.0/s  waiting 10 (-3.0/s)  dead 1 (+0.1/s)  wrong 0"
    )


def test_a_program_that_started_again_or_is_away_has_no_rate() -> None:
    first, second = (program("broker", at, totals={"accepted": at * 10}) for at in (10, 20))
    rates = Rates()
    for one in (first, second, program("broker", 30, totals={"accepted": 1}, started_at=BEGAN + timedelta(seconds=25))):
        rates.see([one])
    assert rates.of("accepted") is None
    rates = Rates()
    for one in (first, second, replace(second, away=True)):
        rates.see([one])
    assert rates.of("accepted") is None
