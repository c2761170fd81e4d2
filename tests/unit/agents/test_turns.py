"""The turns at a store, and the note of what an agent runs: it outlives the process, and what is no note is none."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.delivery.agents.turns import Begun, Turns


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[Turns]:
    opened = Turns(tmp_path)
    yield opened
    opened.close()


def test_a_new_file_says_that_nothing_runs(turns: Turns):
    assert turns.left_behind() is None


def test_what_began_and_did_not_end_is_found_by_whoever_comes_next(turns: Turns, tmp_path: Path):
    turns.begin(Begun("a longer id than the next, with a line\nbreak", 1))
    turns.begin(Begun("order-1", 2))
    later = Turns(tmp_path)
    assert later.left_behind() == Begun("order-1", 2)
    later.close()


def test_what_ended_is_not(turns: Turns):
    turns.begin(Begun("order-1", 2))
    turns.end()
    assert turns.left_behind() is None


def test_an_id_of_any_length_is_kept(turns: Turns):
    turns.begin(Begun("x" * 10_000, 1))
    assert turns.left_behind() == Begun("x" * 10_000, 1)


@pytest.mark.parametrize("rest", [b"", bytes(100), b'["order-1",', b'["order-1","2"]\n', b"\xff\n"])
def test_what_a_power_cut_made_of_it_is_nothing(turns: Turns, tmp_path: Path, rest: bytes):
    (tmp_path / "events.underway").write_bytes(rest)
    assert turns.left_behind() is None


async def test_a_process_that_waits_long_for_its_turn_says_so(tmp_path: Path):
    now, waited = 0.0, asyncio.Event()
    mine, of_another = Turns(tmp_path, clock=lambda: now), Turns(tmp_path)

    async def wait() -> None:
        waited.set()
        async with mine.turn():
            pass

    async with of_another.turn():
        waiting = asyncio.create_task(wait())
        await waited.wait()
        now = 89.0
        assert mine.trouble is None
        now = 90.0
        assert mine.trouble is not None
        assert "another process of the agent" in mine.trouble
    await waiting
    assert mine.trouble is None
    mine.close()
    of_another.close()
