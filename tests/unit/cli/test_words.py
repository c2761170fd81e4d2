"""What people write on a command line, read: durations, rates, meta data, times, bodies."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from support.terminal import Terminal

from cli.noun import age, duration, moment, rate
from cli.output import printable, table
from cli.send import body_of, meta_of, moment_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("1h30m", 5400), ("7d", 604800), ("2w", 1209600), ("0.5s", 0.5), ("0s", 0)],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "1", "h", "1x", "-1h", "1 h", "1h ", "1e3s", "infd", "1h,2m"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        duration(text)


@pytest.mark.parametrize("read", [duration, moment, age])
@pytest.mark.parametrize("text", ["9" * 400 + "d", "36525.1d", "٣h", "²d"])
def test_a_duration_that_nobody_means_is_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(typer.BadParameter):
        read(text)


@pytest.mark.parametrize(
    "text",
    [
        "2026-01-31",
        "2026-01-31T00:00",
        "2026-01-31 00:00:00",
        "2026-01-31T00:00:00Z",
        "2026-01-31t00:00:00z",  # RFC 3339 has both
        "2026-01-31T02:00:00+02:00",
    ],
)
def test_a_moment_is_a_time_in_utc_unless_it_says_otherwise(text: str) -> None:
    assert moment(text) == datetime(2026, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize("text", ["30m", "1h", "2d", "1h30m"])
def test_a_moment_may_be_said_by_how_long_ago_it_was(text: str) -> None:
    before = datetime.now(UTC)
    found = moment(text) + timedelta(seconds=duration(text))
    assert before <= found <= datetime.now(UTC)
    assert age(text) == {"older_than_seconds": duration(text)}


def test_how_old_something_is_may_be_said_by_a_time_which_no_clock_moves() -> None:
    assert age("2026-01-31") == {"before": datetime(2026, 1, 31, tzinfo=UTC)}


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "9999-12-31", "0001-01-01T00:00+23:59", "1", "-1h"])
def test_what_is_no_moment_that_is_over_is_refused(text: str) -> None:
    said = []
    for read in (moment, age):
        with pytest.raises(typer.BadParameter) as refused:
            read(text)
        said.append(str(refused.value))
    assert said[0] == said[1]


@pytest.mark.parametrize(("text", "per_second"), [("50/s", 50), ("50", 50), ("0.5/s", 0.5)])
def test_a_rate_is_read_per_second(text: str, per_second: float) -> None:
    assert rate(text) == per_second


@pytest.mark.parametrize("text", ["", "0", "0/s", "-1/s", "1/m", "fast", "inf", "nan", "9" * 400])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        rate(text)


def test_meta_is_text_by_key() -> None:
    assert meta_of(["a=1", "b=x=y", "c="]) == {"a": "1", "b": "x=y", "c": ""}
    assert meta_of(None) is None


@pytest.mark.parametrize("pairs", [["a"], ["=1"], ["a=1", "a=2"], [""]])
def test_meta_that_is_none_is_refused(pairs: list[str]) -> None:
    with pytest.raises(typer.BadParameter):
        meta_of(pairs)


def test_a_moment_needs_an_offset() -> None:
    assert moment_of("2026-11-21T09:00:00Z") == datetime(2026, 11, 21, 9, tzinfo=UTC)
    for text in ("2026-11-21T09:00:00", "2026-11-21", "soon", ""):
        with pytest.raises(typer.BadParameter):
            moment_of(text)


@given(st.binary())
def test_a_body_is_kept_byte_for_byte(data: bytes) -> None:
    body = body_of(data)
    assert (body.encode() if isinstance(body, str) else body) == data
    assert isinstance(body, bytes) or "\0" not in body


@given(st.text())
def test_nothing_printable_changes_and_nothing_else_gets_through(text: str) -> None:
    shown = printable(text)
    assert all(character.isprintable() or character in "\n\t" for character in shown)
    if text.isprintable():
        assert shown == text


def test_a_table_in_a_pipe_is_aligned_whatever_its_cells_hold(capsys: pytest.CaptureFixture[str]) -> None:
    table(("A", "TO", "ERROR"), [(1, "日本", None), (22, "x\ny", "late"), (None, "", "")])
    assert capsys.readouterr().out == "A   TO    ERROR\n1   日本\n22  x y   late\n\n"


@pytest.mark.parametrize(
    ("arguments", "argument", "rule"),
    [
        (["mesh", "create", "shop-eu"], "SLUG", "a mesh's name: a lower-case letter"),
        (["mesh", "delete", "Shop", "--yes"], "SLUG", "a mesh's name"),
        (["mesh", "create", "cmd"], "SLUG", "not `cmd`"),
        (["member", "create", "Alice", "--mesh", "demo"], "NAME", "a member's name"),
        (["member", "create", "alice", "--mesh", "de-mo"], "--mesh", "a mesh's name"),
        (["member", "revoke", "a b", "--mesh", "demo", "--yes"], "NAME", "a member's name"),
        (["member", "rotate-token", "a\nb", "--mesh", "demo"], "NAME", "a member's name"),
        (["topic", "create", "or-ders", "--mesh", "demo"], "NAME", "a topic's name"),
        (["topic", "subscribe", "orders", "Bob", "--mesh", "demo"], "MEMBER", "a member's name"),
        (["topic", "unsubscribe", "or-ders"], "NAME", "a topic's name"),
        (["topic", "webhook", "list", "or-ders", "--mesh", "demo"], "TOPIC", "a topic's name"),
        (["queue", "create", "a..b", "--mesh", "demo"], "NAME", "a queue's name: one to four words"),
        (["send", "topic:orders", "x", "--mention", "Bob"], "mention", "a member's name"),
        (["inbox", "list", "--from", "Bob"], "--from", "a member's name"),
    ],
)
def test_a_name_that_is_none_is_refused_by_its_argument_and_its_rule(
    arguments: list[str], argument: str, rule: str
) -> None:
    refused = Terminal().run(*arguments)
    assert refused.code == 2, refused
    assert argument in refused.sentence()
    assert rule in refused.sentence()
    assert "$" not in refused.sentence()
    assert "regex" not in refused.sentence()
