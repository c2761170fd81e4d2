"""A test session that is killed leaves nothing behind, not even what was detached from it on purpose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from embedded import ProcessIdentity
from embedded.server import wait_until

TESTS = Path(__file__).parents[2]
SECONDS = 60.0
SESSION = """
import os, signal, subprocess, sys
from pathlib import Path
from embedded import ProcessIdentity
from support.janitor import clearing_up
directory = Path(sys.argv[1])
detached = subprocess.Popen(["sleep", "600"], start_new_session=True)
(directory / "1" / "mailroom").mkdir(parents=True)
ProcessIdentity.of(detached.pid).write(directory / "1" / "mailroom" / "up.pid")
with clearing_up(directory):
    print(detached.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
WRITER = """
import itertools, sys, time
from pathlib import Path
server = Path(sys.argv[1], "server")
server.mkdir(parents=True)
first = server / "0"
for number in itertools.count():
    (server / str(number)).mkdir()
    if not first.exists():
        break
    time.sleep(0.001)
"""


def test_what_a_killed_session_had_detached_is_ended_and_its_files_are_removed(tmp_path: Path) -> None:
    directory = tmp_path / "session"
    directory.mkdir()
    session = subprocess.run(
        [sys.executable, "-c", SESSION, directory], env={"PYTHONPATH": str(TESTS)}, capture_output=True, check=False
    )
    pid = int(session.stdout)
    assert wait_until(lambda: not directory.exists(), SECONDS)
    detached = ProcessIdentity.of(pid)  # perhaps a zombie
    assert detached is None or detached.wait(SECONDS)


def test_a_shell_of_a_killed_session_types_nothing_more(tmp_path: Path) -> None:
    """It would start what nobody ends, in the directory that it makes anew."""
    directory = tmp_path / "session"
    home = directory / "1"
    home.mkdir(parents=True)
    shell = ["bash", "-c", "while sleep 0.1; do mkdir -p ~/mailroom; done"]
    janitor = [sys.executable, TESTS / "support/janitor.py", directory]
    with subprocess.Popen(shell, env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, start_new_session=True) as typing:
        try:
            assert wait_until((home / "mailroom").exists, SECONDS)
            subprocess.run(janitor, stdin=subprocess.DEVNULL, env={"PYTHONPATH": str(TESTS)}, check=True)
            assert typing.poll() is not None
        finally:
            typing.kill()
    assert not directory.exists()


def test_what_a_server_writes_before_it_ends_too_is_removed_as_well(tmp_path: Path) -> None:
    directory = tmp_path / "session"
    janitor = [sys.executable, TESTS / "support/janitor.py", directory]
    with subprocess.Popen([sys.executable, "-c", WRITER, directory], stderr=subprocess.DEVNULL):
        assert wait_until(directory.exists, SECONDS)
        subprocess.run(janitor, stdin=subprocess.DEVNULL, env={"PYTHONPATH": str(TESTS)}, check=True)
        assert not directory.exists()
