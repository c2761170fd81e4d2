"""The note of what an agent runs: it outlives the process, and what is no note is none."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.delivery.agents.turns import Begun, Underway


@pytest.fixture
def underway(tmp_path: Path) -> Iterator[Underway]:
    opened = Underway(tmp_path, "events")
    yield opened
    opened.close()


def test_a_new_file_says_that_nothing_runs(underway: Underway):
    assert underway.left_behind() is None


def test_what_began_and_did_not_end_is_found_by_whoever_comes_next(underway: Underway, tmp_path: Path):
    underway.begin(Begun("a longer id than the next, with a line\nbreak", 1))
    underway.begin(Begun("order-1", 2))
    later = Underway(tmp_path, "events")
    assert later.left_behind() == Begun("order-1", 2)
    later.close()


def test_what_ended_is_not(underway: Underway):
    underway.begin(Begun("order-1", 2))
    underway.end()
    assert underway.left_behind() is None


def test_an_id_of_any_length_is_kept(underway: Underway):
    underway.begin(Begun("x" * 10_000, 1))
    assert underway.left_behind() == Begun("x" * 10_000, 1)


@pytest.mark.parametrize("rest", [b"", bytes(100), b'["order-1",', b'["order-1","2"]\n', b"\xff\n"])
def test_what_a_power_cut_made_of_it_is_nothing(underway: Underway, tmp_path: Path, rest: bytes):
    (tmp_path / "events.underway").write_bytes(rest)
    assert underway.left_behind() is None
