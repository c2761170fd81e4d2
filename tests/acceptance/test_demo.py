"""`postroom demo`: every number holds, and nothing is left, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cli.demo
from embedded.processes import tethered
from embedded.server import wait_until

SECONDS = 60.0


def start(directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        tethered([sys.executable, "-m", "cli", "demo"]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(directory)},
    )


def processes_of(directory: Path) -> list[str]:
    """Return the command line of every process that works below `directory`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if str((entry / "cwd").readlink()).startswith(f"{directory}/"):
                found.append((entry / "cmdline").read_text())
        except OSError:
            continue
    return found


def test_every_number_of_the_demo_holds_and_nothing_is_left(short_directory: Path) -> None:
    with start(short_directory) as demo:
        output, errors = demo.communicate()
    assert demo.returncode == 0, errors
    rows = {line.split()[0]: line.split()[-4:] for line in output.splitlines() if line.endswith(("yes", "NO"))}
    assert rows == {
        "sent": ["3,005", "3,005", "3,004", "yes"],
        "accepted": ["3,005", "3,005", "3,005", "yes"],
        "duplicates": ["500", "500", "500", "yes"],
        "dead": ["1", "1", "0", "yes"],
        "requeued": ["1", "1", "1", "yes"],
        "handled": ["2,232", "2,232", "2,232", "yes"],
        "answered": ["3", "3", "3", "yes"],
        "kept": ["770", "770", "770", "yes"],
        "replayed": ["1", "1", "1", "yes"],
        "lost": ["0", "0", "0", "yes"],
    }
    assert "3,005 accepted: 2,232 handled, 3 answered, and 770 kept" in output
    assert processes_of(short_directory) == []
    assert list(short_directory.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_demo_that_is_stopped_in_the_middle_leaves_nothing_running(
    short_directory: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(short_directory) as demo:
        assert demo.stdout is not None
        assert any(line.startswith("   daemon    ready") for line in demo.stdout)
        assert len(processes_of(short_directory)) > 5
        demo.send_signal(number)
        demo.communicate()
    assert demo.returncode != 0
    assert wait_until(lambda: not processes_of(short_directory), SECONDS)
    monkeypatch.setattr("tempfile.tempdir", str(short_directory))
    cli.demo.sweep()  # as the next demo does
    assert list(short_directory.iterdir()) == []
