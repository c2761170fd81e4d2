"""What is drawn on a terminal: a table cuts nothing, however narrow that is, and a progress says how fast it goes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from cli.output import Progress, fields, fold_command, line, progress, table, tree

ID = "6fa459ea-ee8a-3ca4-894e-db77e160355e"
NARROW = st.text("abcdefgh-._", min_size=1, max_size=60)
WORDS = NARROW | st.text("語가👍e\u0301", min_size=1, max_size=30)  # two columns each, or none
CELLS = st.one_of(WORDS, st.lists(WORDS, max_size=12).map(" ".join), st.integers(), st.none())
TABLES = st.integers(1, 9).flatmap(lambda width: st.lists(st.tuples(*[CELLS] * width), min_size=1, max_size=4))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """How to have something drawn on a terminal of 80 columns without colours; returns its lines."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")

    def draw(what: Callable[..., None], *arguments: object) -> list[str]:
        capsys.readouterr()
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        what(*arguments)
        return capsys.readouterr().out.splitlines()

    return draw


@given(rows=TABLES)
@settings(max_examples=50)
def test_every_word_is_whole_and_no_line_is_wider_than_the_terminal(
    shown: Callable[..., list[str]], rows: list[tuple[object, ...]]
) -> None:
    lines = shown(table, [f"C{number}" for number in range(len(rows[0]))], rows)
    words = [word for row in rows for cell in row if cell is not None for word in str(cell).split()]
    assert sorted(set(words) - set(" ".join(lines).split())) == []
    assert all(cell_len(line) <= 80 for line in lines)


def test_columns_that_do_not_fit_stand_below_with_their_names(shown: Callable[..., list[str]]) -> None:
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    assert shown(table, ("ID", "AT", "OTHER", "WHY"), [(ID, moment, ID, "the wrong day"), (ID, moment, ID, None)]) == [
        "ID                                    AT",
        f"{ID}  2026-01-31 12:00:00Z",
        f"  OTHER {ID}  WHY the wrong day",
        f"{ID}  2026-01-31 12:00:00Z",
        f"  OTHER {ID}",
    ]


@pytest.mark.parametrize("columns", ["0", "1", "2"])
def test_a_terminal_without_room_gets_every_word_too(
    shown: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")  # Rich has its own idea of a dumb one
    words = " ".join(shown(table, ("ID", "WHY"), [(ID, "the wrong day")])).split()
    assert {ID, "the", "wrong", "day"} <= set(words)


def test_a_sentence_folds_within_its_column_where_that_is_enough(shown: Callable[..., list[str]]) -> None:
    assert shown(table, ("ID", "WHY"), [(ID, "the consumer was down for longer than anybody had thought")]) == [
        "ID                                    WHY",
        f"{ID}  the consumer was down for longer than",
        " " * 38 + "anybody had thought",
    ]


def test_a_long_name_among_fields_is_whole(shown: Callable[..., list[str]]) -> None:
    (first, *_) = shown(fields, [("consumer", "c" * 60), ("why", "w" * 100)])
    assert first == "consumer  " + "c" * 60


def test_no_word_among_fields_is_cut_on_a_narrow_terminal(
    shown: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    lines = shown(
        fields, [("broker message id", ID), ("held", None), ("last error", "the wrong day of all days"), ("x", "")]
    )
    assert lines == [
        f"broker message id  {ID}",
        "last error         the wrong day of all",
        "                   days",
        "x",
    ]
    monkeypatch.setenv("COLUMNS", "1")
    assert shown(fields, [("id", ID)]) == [f"id  {ID}"]


def test_no_word_of_a_chain_is_cut_on_a_terminal_that_it_does_not_fit(shown: Callable[..., list[str]]) -> None:
    assert shown(tree, f"{ID}  {ID}  aborted", [f"{ID}  {ID}  pending  ← this one", "done"]) == [
        f"{ID}  {ID}",
        "   aborted",
        f"└─ {ID}  {ID}",
        "      pending  ← this one",
        "   └─ done",
    ]


def test_wide_characters_fold_by_the_columns_that_they_take(
    shown: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(["今日は注文が多い"] * 6)  # 16 columns each
    assert shown(fields, [("why", words)]) == [f"why  {words[:35]}", f"     {words[36:]}"]
    assert shown(tree, words, []) == [words[:35], f"   {words[36:]}"]
    assert next(fold_command(f"postroom {words}", 80, "")) == f"postroom {words[:35]} \\"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    Progress.say("今" * 80)
    assert capsys.readouterr().err == "\r\033[K" + "今" * 39


def test_what_takes_longer_than_a_second_says_how_far_it_is_and_how_fast_it_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for total, rest in ((None, ""), (4000, ", 25%, 6 s left")):
        times = iter((0.0, 0.9, 2.0, 2.05))  # the beginning, too soon, seen, the same frame
        shown = Progress(total, clock=times.__next__)
        for words in ("0.9 s", "2.0 s", "2.05 s"):
            shown.show(1000, words)
        assert capsys.readouterr().err == f"\r\033[K2.0 s, 500 a second{rest}"
        line("a line of its own")
        assert capsys.readouterr() == ("a line of its own\n", "\r\033[K")


def test_nothing_is_drawn_without_a_terminal_nor_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = count()
    shown = Progress(None, clock=lambda: float(next(ticks)))
    shown.show(1, "x")
    shown.show(2, "x")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress(as_json=True) as show:
        show(3, "x")
    assert capsys.readouterr().err == ""
