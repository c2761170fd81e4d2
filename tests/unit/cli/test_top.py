"""How quickly things go: by the last two reports of each program, and of all together."""

from __future__ import annotations

import math
import os
import pty
import re
import signal
import termios
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.terminal import SECONDS, Terminal

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


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (40, 12), (20, 5), (10, 3)])
def test_a_frame_has_no_more_rows_than_the_terminal(short_directory: Path, columns: int, lines: int) -> None:
    user = Terminal(short_directory / ("long-name-" * 5))
    seen = user.at_a_terminal("top", "--count", "1", "--interval", "0.1", COLUMNS=str(columns), LINES=str(lines))
    frame = seen.out.split("\033[H\033[J")[1].split("\033[?25h")[0]
    texts = re.sub(r"\x1b\[[0-9;]*m", "", frame).split("\r\n")
    assert sum(max(1, math.ceil(len(text) / columns)) for text in texts) <= lines  # else the first ones scroll away
    assert texts[-1].startswith("q quit")


def test_a_terminal_that_cannot_draw_gets_lines(short_directory: Path) -> None:
    user = Terminal(short_directory / "nobody.sock")
    seen = user.at_a_terminal("top", "--count", "2", "--interval", "0.1", TERM="dumb")
    assert "\x1b" not in seen.out
    assert [line.split("  ")[1] for line in seen.out.splitlines()] == ["queued -", "queued -"]


def test_an_interval_that_is_no_number_is_refused(short_directory: Path) -> None:
    seen = Terminal(short_directory / "nobody.sock").run("top", "--count", "2", "--interval", "nan")
    assert (seen.code, "--interval is not a number" in seen.sentence()) == (2, True)


def test_a_terminal_is_as_it_was_while_it_is_stopped(short_directory: Path) -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    user = Terminal(short_directory / "nobody.sock", TERM="xterm")
    running = user.start("top", stdin=slave, stdout=slave, stderr=slave, process_group=0)
    shown = b""
    while b"q quit" not in shown:
        shown += os.read(master, 65536)
    running.send_signal(signal.SIGTSTP)
    os.waitid(os.P_PID, running.pid, os.WSTOPPED)
    assert termios.tcgetattr(slave) == before
    running.send_signal(signal.SIGCONT)
    shown = b""
    while b"q quit" not in shown:
        shown += os.read(master, 65536)
    assert b"\x1b[?1049l" in shown
    assert b"\x1b[?1049h" in shown
    os.write(master, b"q")
    assert running.wait(SECONDS) == 0
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_terminal_is_as_it_was_after_a_signal_that_ends_it(short_directory: Path, number: signal.Signals) -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    user = Terminal(short_directory / "nobody.sock", TERM="xterm")
    running = user.start("top", stdin=slave, stdout=slave, stderr=slave, cwd=short_directory)
    shown = b""
    while b"q quit" not in shown:
        shown += os.read(master, 65536)
    running.send_signal(number)
    assert running.wait(SECONDS) == -number
    assert termios.tcgetattr(slave) == before
    shown = b""
    while b"\x1b[?1049l" not in shown:
        shown += os.read(master, 65536)
    os.close(master)
    os.close(slave)
