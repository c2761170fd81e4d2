"""A test that hangs is ended and named with where it hangs, and a run that is ended names its tests."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HANGING = """
import asyncio, ctypes, socket, time
import pytest

@pytest.fixture
def slow():
    yield
    time.sleep(60)

@pytest.mark.timeout(1)
def test_that_keeps_the_interpreter():
    ctypes.PyDLL(None).sleep(60)

@pytest.mark.timeout(1)
def test_that_fails_before_it_hangs(slow):
    assert False

@pytest.mark.timeout(30)
async def test_that_fails_with_a_connection_open():
    ends = socket.socketpair()
    streams = [await asyncio.open_unix_connection(sock=end) for end in ends]
    assert False

@pytest.mark.timeout(0)
def test_that_may_take_all_day():
    time.sleep(60)
"""


def run(tmp_path: Path, name: str) -> subprocess.Popen[str]:
    """Run one test of `HANGING` in a worker, as `make test` does."""
    (file := tmp_path / "test_hanging.py").write_text(HANGING)
    options = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-p", "conftest", "-p", "no:cacheprovider"]
    workers = ["-v", "-n", "1", "--max-worker-restart", "0"]
    command = [sys.executable, "-m", "pytest", *options, *workers, f"{file}::{name}"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("test_that_keeps_the_interpreter", "test_that_keeps_the_interpreter"),
        ("test_that_fails_before_it_hangs", "slow"),
    ],
)
def test_a_test_that_hangs_is_ended_and_named_with_its_place(tmp_path: Path, name: str, place: str) -> None:
    with run(tmp_path, name) as running:
        said, _ = running.communicate()
    assert running.returncode == 1
    assert f"crashed while running 'test_hanging.py::{name}'" in said
    assert f"in {place}\n" in said


def test_a_connection_that_a_failed_test_leaves_open_is_told_and_does_not_hang(tmp_path: Path) -> None:
    with run(tmp_path, "test_that_fails_with_a_connection_open") as running:
        said, _ = running.communicate()
    assert "crashed" not in said
    assert "1 failed, 1 error" in said
    assert "ResourceWarning: unclosed resource <UnixTransport" in said


def test_a_run_that_is_ended_names_the_tests_that_ran(tmp_path: Path) -> None:
    begun = "test_hanging.py::test_that_may_take_all_day"
    with run(tmp_path, "test_that_may_take_all_day") as running:
        assert running.stdout is not None
        said = ""
        while begun not in said and (more := running.stdout.read(1)):
            said += more
        running.terminate()
        assert begun in running.stdout.read()
    assert running.returncode == -signal.SIGTERM
