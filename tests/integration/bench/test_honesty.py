"""The benchmarks count only what was acknowledged, and say by their exit code whether their goals were met."""

import sys

import pytest

from bench import __main__ as bench
from bench.driver import Void, drive, drive_steadily, drive_threads
from bench.goals import GOALS
from bench.processes import daemon, load
from bench.report import Goal, Measure, Results, write
from postroom import AsyncClient, Client, PostroomError

FULL = 2**20  # bytes of an outbox that a short load fills


def test_a_raw_load_that_is_refused_shows_nothing(short_directory):
    with daemon(short_directory, OUTBOX_MAX_BYTES=FULL) as running, pytest.raises(Void, match="a send was refused"):
        load(running.socket, connections=8, seconds=60, first=0)


@pytest.mark.parametrize("driver", [drive, drive_steadily])
async def test_a_clients_load_that_is_refused_shows_nothing(driver, short_directory):
    with daemon(short_directory, OUTBOX_MAX_BYTES=FULL) as running:
        async with AsyncClient(running.socket, patience=0) as client:
            how = {"at_once": 8} if driver is drive else {"rate": 2000}
            with pytest.raises(Void, match="a send failed") as error:
                await driver(lambda _: client.send("topic:orders", "x" * 1024), range(5000), **how)
            assert isinstance(error.value.__cause__, PostroomError)


def test_a_blocking_clients_load_that_is_refused_shows_nothing(short_directory):
    with (
        daemon(short_directory, OUTBOX_MAX_BYTES=FULL) as running,
        Client(running.socket, patience=0) as client,
        pytest.raises(Void, match="a send failed"),
    ):
        drive_threads(lambda _: client.send("topic:orders", "x" * 1024), range(5000), at_once=2)


async def test_a_load_counts_each_acknowledgement_once(short_directory):
    with daemon(short_directory) as running:
        async with AsyncClient(running.socket) as client:
            found = await drive(lambda _: client.send("topic:orders", "x"), range(100), at_once=8)
            rows = (await client.health()).rows
    assert found.sent == len(found.latencies) == len(found.began) == sum(rows.values()) == 100


@pytest.mark.parametrize(
    ("figures", "status"),
    [([2.0, 3.0, 0.1], 0), ([0.9, 3.0, 0.5], 1), ([], 1), ([Void("a send failed")], 1), ([OSError("broken")], 1)],
    ids=["met by the median", "missed", "not measured", "void", "broken"],
)
def test_the_exit_code_says_whether_the_goals_were_met(figures, status, monkeypatch):
    waiting = iter(figures)

    async def benchmark(_place, _scale, _results):
        for found in waiting:
            if isinstance(found, Exception):
                raise found
            yield Measure("of the peer", found, "x")

    monkeypatch.setitem(bench.BENCHMARKS, "tried", benchmark)
    monkeypatch.setattr(bench, "GOALS", {"tried": {"of the peer": Goal(1.0)}})
    monkeypatch.setattr(sys, "argv", ["bench", "tried", "--runs", "1"])
    assert bench.main() == status


def test_a_goal_may_be_a_limit():
    results = Results({"p99": Goal(5, at_most=True)}, "a machine")
    results.add(Measure("p99", 6, "ms"))
    assert not results.passed
    assert "| p99 | 6.00 ms | one run | ≤ 5 | **missed** |" in results.text("bench")


def test_every_benchmark_has_its_place_on_the_page_and_every_goal_its_benchmark(tmp_path):
    assert set(GOALS) <= set(bench.BENCHMARKS)
    page = tmp_path / "performance.md"
    page.write_text(bench.PAGE.read_text())
    for name in bench.BENCHMARKS:
        write(name, f"figures of {name}", page)
    assert all(f"figures of {name}\n" in page.read_text() for name in bench.BENCHMARKS)
