"""New files that a command writes: whole under their name, or not at all, and never in the place of another."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import pytest

from cli.files import new_file
from cli.main import ending
from postroom.chassis.exits import Exit, Fatal


@pytest.fixture(params=["with", "without"])
def directory(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a file system with hard links, or without, as on many sticks and shares."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if request.param == "without":
        monkeypatch.setattr(os, "link", refuse)
    return tmp_path


def test_a_new_file_has_its_name_once_it_is_whole(directory: Path) -> None:
    file = directory / "copy"
    with new_file(file) as stream:
        stream.write(b"whole")
        stream.flush()
        assert not file.exists()
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"whole", 0o600)
    assert list(directory.iterdir()) == [file]


def test_a_file_that_came_meanwhile_stays(directory: Path) -> None:
    file = directory / "copy"

    def write() -> None:
        with new_file(file) as stream:
            stream.write(b"mine")
            file.write_text("theirs")

    with pytest.raises(Fatal, match="it exists; choose another name") as refused:
        write()
    assert (refused.value.exit_code, file.read_text()) == (Exit.IO_ERROR, "theirs")
    assert list(directory.iterdir()) == [file]


def test_a_file_that_could_not_be_written_leaves_nothing(directory: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_file(directory / "copy"):
        raise ZeroDivisionError
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_of_a_file_that_is_not_whole(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A draft may hold bodies of messages, and nobody looks for it."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # what an interrupt sets ends with the test
    with pytest.raises(KeyboardInterrupt), new_file(directory / "copy"):
        os.kill(os.getpid(), number)
    assert list(directory.iterdir()) == []


def test_a_signal_that_nohup_has_ignored_stays_ignored(directory: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with new_file(directory / "copy"):
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (directory / "copy").exists()


def test_ctrl_c_interrupts_what_a_script_has_started_in_the_background(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)  # as above
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), new_file(directory / "copy"):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_command_that_may_not_use_a_file_is_not_permitted() -> None:
    refused = OSError(errno.EACCES, os.strerror(errno.EACCES), "/mailroom/up.pid")
    assert ending(refused) == (Exit.NOT_PERMITTED, "/mailroom/up.pid: Permission denied; use an account that may")
