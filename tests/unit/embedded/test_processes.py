"""Identities, pid files and the tether."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from embedded.processes import ProcessIdentity, tethered


def me() -> ProcessIdentity:
    identity = ProcessIdentity.of(os.getpid())
    assert identity is not None
    return identity


def test_a_pid_file_gives_back_the_identity_it_was_written_with(tmp_path: Path) -> None:
    me().write(tmp_path / "me.pid")
    assert ProcessIdentity.read(tmp_path / "me.pid") == me()


def test_a_pid_file_names_nobody_in_a_copy_of_its_directory_and_the_same_process_where_that_was_moved(
    tmp_path: Path,
) -> None:
    (tmp_path / "here").mkdir()
    me().write(tmp_path / "here" / "me.pid")
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    (tmp_path / "here").rename(tmp_path / "there")
    assert ProcessIdentity.read(tmp_path / "copy" / "me.pid") is None
    assert ProcessIdentity.read(tmp_path / "there" / "me.pid") == me()


@pytest.mark.parametrize("text", ["", "12", "12 34", "1 2 3", "a b c d", "1 2 3 4"])
def test_a_broken_pid_file_names_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.pid").write_text(text)
    assert ProcessIdentity.read(tmp_path / "x.pid") is None


@pytest.mark.parametrize("change", [{"started": 1}, {"boot": "another"}])
def test_another_start_or_another_boot_is_another_process(change: dict[str, int]) -> None:
    stranger = me()._replace(**change)
    assert not stranger.alive
    assert not stranger.send(signal.SIGKILL)  # or this test would not end
    assert stranger.wait(0)


def test_a_process_that_runs_on_is_reported_after_the_wait() -> None:
    assert not me().wait(0)


def test_a_signal_that_is_ignored_is_followed_by_one_that_is_not() -> None:
    script = "trap '' TERM; echo; while :; do wait; sleep 600 & wait; done"
    command = tethered(["/bin/sh", "-c", script])
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as stubborn:
        assert stubborn.stdout is not None
        stubborn.stdout.readline()
        identity = ProcessIdentity.of(stubborn.pid)
        assert identity is not None
        assert identity.end((signal.SIGTERM, 0.05), (signal.SIGKILL, 20))
        os.killpg(stubborn.pid, signal.SIGKILL)  # its sleep
        assert stubborn.wait() == -signal.SIGKILL


def test_a_command_whose_parent_has_ended_already_does_not_start() -> None:
    command = tethered(["/bin/true"])
    command[4] = "1" if os.getppid() != 1 else str(os.getppid() + 1)
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode != 0
    assert b"has ended" in done.stderr


def test_a_command_that_cannot_run_is_named() -> None:
    done = subprocess.run(tethered(["/no/such/program"]), capture_output=True, check=False)
    assert done.returncode != 0
    assert done.stderr == b"cannot run /no/such/program: No such file or directory\n"
