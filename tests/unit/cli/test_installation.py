"""Which lines of `status` are read without Typer, and what a screen shows of many troubles."""

from __future__ import annotations

import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cli.installation import Place, Sight, _answer, parse_status
from cli.screen import Screen, show_status
from postroom._wire.jobs import JobCounts
from postroom._wire.programs import Program, ProgramPart, Trouble
from postroom.errors import TryAgain

REACH = {"POSTROOM_BROKER_URL": "http://b", "POSTROOM_BROKER_TOKEN_FILE": "/t", "POSTROOM_STATE": "/s"}


@pytest.mark.parametrize(
    ("line", "environ", "read"),
    [
        ("", {}, (Place(), False)),
        ("--json", {}, (Place(), True)),
        ("", REACH, (Place(Path("/s"), None, "http://b", Path("/t")), False)),
        ("", REACH | {"POSTROOM_ADMIN_TOKEN_FILE": "/a"}, (Place(Path("/s"), None, "http://b", Path("/a")), False)),
        ("--url http://c --socket /d", REACH, (Place(Path("/s"), Path("/d"), "http://c", Path("/t")), False)),
    ],
)
def test_a_plain_status_is_read(line: str, environ: dict[str, str], read: tuple[Place, bool]) -> None:
    assert parse_status(["status", *line.split()], environ) == read


@pytest.mark.parametrize("line", ["--help", "x", "--url", "--url -", "--url a --url b", "--state", "--nonsense"])
def test_any_other_line_is_typers(line: str) -> None:
    assert parse_status(["status", *line.split()], {}) is None
    assert parse_status(["status"], {"_POSTROOM_COMPLETE": "complete_bash"}) is None


def test_what_is_down_counts_more_than_what_is_wrong() -> None:
    down, wrong, look = (Trouble("it", "is so", "help it", level) for level in ("down", "wrong", "look"))
    assert [Sight(troubles=found).exit_code for found in ([], [look], [look, wrong], [wrong, down])] == [0, 1, 1, 69]


def test_a_flow_is_unattended_where_no_worker_has_it_and_a_worker_that_is_away_is_a_trouble_of_its_own() -> None:
    now = datetime.now(UTC)
    program = Program(
        kind="worker",
        name="worker",
        host="blue",
        pid=1,
        version="1",
        status="ok",
        started_at=now,
        at=now,
        reported_at=now,
        clock_seconds=0,
        away=True,
        parts=[ProgramPart(name="publishing", flows=["export"])],
    )
    counts = JobCounts(running=3, failed=0, unknown=0, flows={"export": 1, "import": 2})
    (found,) = counts.unattended([program])
    assert (found.thing, found.what.partition(" not")[0]) == ("flow import", "2 jobs have")


@pytest.mark.parametrize(("pid", "host", "shown"), [(7, None, "tail"), (0, None, "tail"), (7, "blue", "journalctl")])
def test_what_up_started_has_a_log_of_its_own_on_this_host_alone(pid: int, host: str | None, shown: str) -> None:
    now = datetime.now(UTC)
    daemon = Program(
        kind="daemon",
        name="alice",
        mesh="demo",
        host=host or socket.gethostname(),
        address="/up/demo.sock",
        pid=pid,
        version="1",
        status="degraded",
        reasons=["it is so"],
        started_at=now,
        at=now,
        reported_at=now,
        clock_seconds=0,
    )
    (found,) = Sight(logs={7: "/up/daemon.log", "/up/demo.sock": "/up/daemon.log"}).troubles_of(daemon)
    assert (found.what, found.help.split()[0]) == ("it is so", shown)


@pytest.mark.parametrize("columns", ["0", "1", "2"])
def test_a_screen_without_room_has_every_word_of_a_table(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    process = {"process": "nats", "state": "running", "pid": 7, "address": "nats://127.0.0.1:4222"}
    words = " ".join(Screen().installation(Sight(processes=[process]))).split()
    assert {"nats", "running", "7", "nats://127.0.0.1:4222"} <= set(words)


def test_a_screen_escapes_what_programs_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(Screen().troubles(Sight(troubles=[Trouble("a\x1b[31m", "b\nc", "d", "down")]))) == [
        "a\\x1b[31m: b c",
        "    d",
    ]
    assert capsys.readouterr().out == ""


def test_what_could_not_be_asked_is_in_brackets() -> None:
    sight = Sight(unseen=["the broker was not asked"])
    assert list(Screen().installation(sight))[-1] == "(the broker was not asked)"
    assert list(Screen().hour(sight))[-1] == "(the broker was not asked)"


def test_why_an_hour_has_no_minutes_is_said_beside_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def look(*_: object, **__: object) -> Sight:
        return Sight(troubles=[Trouble("the broker", "no answer", "postroom doctor", "down")], unseen=["consumers: no"])

    monkeypatch.setattr("cli.screen.look", look)
    with pytest.raises(SystemExit, match="69"):
        show_status(Place(), as_json=True, hour=True)
    assert capsys.readouterr() == ("", "the broker: no answer\nconsumers: no\n")


async def test_a_broker_that_cannot_answer_says_nothing_of_the_server_that_it_was_asked_about() -> None:
    async def ask() -> dict[str, Any]:
        raise TryAgain.of("database_unavailable", "the broker cannot reach its database: try again")

    assert await _answer(ask(), of_the_broker=True) == {}
    assert (await _answer(ask()))["state"] == "failing"
