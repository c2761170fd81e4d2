"""What `postroom up` says once everything runs."""

from __future__ import annotations

import errno
import json
import os
import pwd
import shutil
import subprocess
from pathlib import Path

import pytest
from support.small_disk import run_on_a_small_disk

from cli import main
from cli.stack import toml
from cli.stack.layout import Layout
from cli.stack.supervisor import last_words
from cli.up import explain
from daemon.config import DaemonConfig
from postroom.chassis.config import load
from postroom.chassis.exits import Exit, Fatal


def test_the_line_to_copy_works_in_a_directory_with_a_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(tmp_path / "mail room")
    layout.state.mkdir()
    layout.env_file.write_text("POSTROOM_MESH=demo\n")
    explain(layout)
    (to_copy,) = (line for line in capsys.readouterr().out.splitlines() if "set -a" in line)
    command = to_copy.removesuffix("set up this shell")
    shell = subprocess.run(["sh", "-c", f"{command}; echo $POSTROOM_MESH"], capture_output=True, text=True, check=True)
    assert shell.stdout == "demo\n"


def test_a_config_in_a_directory_named_like_a_variable_is_for_that_directory(tmp_path: Path) -> None:
    state = tmp_path / "a $HOME"
    settings = {"mesh": "sea", "state_directory": state, "broker": {"url": "http://127.0.0.1:1", "token_file": state}}
    tmp_path.joinpath("daemon.toml").write_text(toml(settings), "utf-8")
    config = load(DaemonConfig, tmp_path / "daemon.toml", prefix="P_", environ={})
    assert config.state_directory == state


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("  redis     ready, pid 7\npostroom: a bug in postroom: NameError: x", "a bug in postroom: NameError: x"),
        ("postroom: the disk is full: postroom: cannot go on\n", "the disk is full: postroom: cannot go on"),
        ("  nats      ready\npostroom: daemon ended; its log:\na\nb\n", "daemon ended; its log:\na\nb"),
    ],
)
def test_a_supervisors_last_words_are_told_whole(tmp_path: Path, log: str, said: str) -> None:
    layout = Layout(tmp_path)
    layout.log_file.write_text(log)
    assert last_words(layout) == said


def test_a_supervisor_that_ended_without_a_word_leads_to_its_log(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.log_file.write_text("  redis     ready, pid 7\n")
    assert str(layout.log_file) in last_words(layout)


@pytest.mark.parametrize(
    ("uid", "environ", "state"),
    [
        (1000, {"XDG_STATE_HOME": "/state", "HOME": "/home/ada"}, "/state/postroom-up"),
        (1000, {"HOME": "/home/ada"}, "/home/ada/.local/state/postroom-up"),
        (0, {"HOME": "/root"}, "/var/lib/postroom-up"),
        (1, {}, f"{pwd.getpwuid(1).pw_dir}/.local/state/postroom-up"),
    ],
)
def test_a_stack_lies_next_to_the_state_of_other_programs(
    monkeypatch: pytest.MonkeyPatch, uid: int, environ: dict[str, str], state: str
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(os, "environ", environ)
    assert Layout.of(None).state == Path(state)


def test_a_stack_of_a_user_without_a_home_needs_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)
    monkeypatch.setattr(os, "environ", {})
    with pytest.raises(
        Fatal, match="HOME is not set, and this user has no home: set it, or set a directory with --state DIR"
    ):
        Layout.of(None)


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_the_place_of_the_state_directory_is_said_to_be_one(
    tmp_path: Path, below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main.run(["up", "--state", str(tmp_path / "file" / below)]) == Exit.CONFIG
    assert f"cannot use the state directory {tmp_path / 'file'}" in capsys.readouterr().err


def test_a_state_directory_with_a_line_break_in_its_name_is_refused_before_it_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "new\nline"
    assert main.run(["up", "--state", str(state)]) == Exit.USAGE
    assert "has a line break in its name" in capsys.readouterr().err
    assert not state.exists()


@pytest.mark.parametrize("verb", ["up", "down", "top"])
def test_a_state_directory_of_another_user_is_said_to_need_an_account_that_may(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "access", lambda *_, **__: False)
    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    assert main.run([verb, "--state", str(tmp_path)]) == Exit.NOT_PERMITTED
    assert capsys.readouterr().err.endswith("Permission denied; use an account that may\n")


@pytest.mark.parametrize("before", ["", '{"outbox/schema.sql": "another digest"}'], ids=["nothing", "another digest"])
def test_a_state_directory_with_other_tables_is_refused_and_says_what_to_do(
    tmp_path: Path, before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout(tmp_path / "its state")
    layout.create()
    (layout.state / "postroom-up").write_text(before)
    assert main.run(["up", "--state", str(layout.state)]) == Exit.CONFIG
    said = capsys.readouterr().err
    assert "outbox/schema.sql" in said
    assert f"`postroom down --wipe --state '{layout.state}'`" in said
    assert main.run(["down", "--wipe", "--yes", "--state", str(layout.state)]) == Exit.OK
    layout.create()


def test_a_state_directory_that_others_may_write_to_is_refused_with_one_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (state := tmp_path / "state").mkdir()
    state.chmod(0o777)
    assert main.run(["up", "--state", str(state)]) == Exit.CONFIG
    why = f"others may write to it: chmod go-w {state}, or choose another directory"
    assert capsys.readouterr().err == f"postroom: cannot use the state directory {state}: {why}\n"


def test_a_state_directory_behind_a_link_is_removed_with_the_link(tmp_path: Path) -> None:
    link, elsewhere = tmp_path / "link", tmp_path / "elsewhere"
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    Layout(link).create()
    assert main.run(["down", "--wipe", "--yes", "--state", str(link)]) == Exit.OK
    assert list(tmp_path.iterdir()) == []


def test_what_links_in_a_state_directory_lead_to_stays_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout, disks = Layout(tmp_path / "state"), [tmp_path / "disk" / name for name in ("nats", "wal")]
    layout.create()
    for disk in disks:
        disk.mkdir(parents=True)
    (layout.state / "nats").symlink_to(disks[0])
    (layout.state / "data").mkdir()
    (layout.state / "data" / "wal").symlink_to(disks[1])
    (layout.state / "data" / "again").symlink_to(layout.state / "data")
    (layout.state / "gone").symlink_to(tmp_path / "gone")
    (layout.state / "loop").symlink_to(layout.state / "loop")
    assert main.run(["down", "--wipe", "--yes", "--state", str(layout.state)]) == Exit.OK
    assert capsys.readouterr().err == f"what links in it led to is not removed: {disks[0]}, {disks[1]}\n"
    assert (layout.state.exists(), [disk.exists() for disk in disks]) == (False, [True, True])


def test_a_removal_that_was_interrupted_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(tmp_path / "state")
    layout.create()

    def interrupt(directory: Path) -> None:
        for entry in directory.iterdir():
            if entry.is_file():
                entry.unlink()
        raise OSError(errno.EIO, "Input/output error", str(directory))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", interrupt)
        assert main.run(["down", "--wipe", "--yes", "--state", str(layout.state)]) == Exit.IO_ERROR
    assert main.run(["down", "--wipe", "--yes", "--state", str(layout.state)]) == Exit.OK
    assert not layout.state.exists()


def test_a_state_directory_gets_the_tables_that_a_later_version_adds(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "state")
    layout.create()
    mark = layout.state / "postroom-up"
    tables = json.loads(mark.read_text())
    assert {name.partition("/")[0] for name in tables} == {
        "broker", "postroom.delivery", "postroom.ledger", "outbox", "inbox"
    }  # fmt: skip
    mark.write_text(json.dumps({name: digest for name, digest in tables.items() if "outbox" not in name}))
    layout.create()
    assert json.loads(mark.read_text()) == tables


FULL_DISK = """
import os
import sys
from pathlib import Path
from cli import main

state, filler = Path(sys.argv[1], "state"), Path(sys.argv[1], "filler")
with filler.open("wb", buffering=0) as full:
    try:
        while True:
            full.write(bytes(4096))
    except OSError:
        pass
sys.stderr = sys.stdout
for _ in range(3):  # a page more of space each time, so that each of the first files is the one that does not fit
    print(main.run(["up", "--state", str(state)]), flush=True)
    os.truncate(filler, filler.stat().st_size - 4096)
"""


async def test_a_full_disk_is_said_to_be_one_whichever_file_does_not_fit(tmp_path: Path) -> None:
    said = await run_on_a_small_disk(tmp_path, FULL_DISK)
    sentences = {line for line in said if "No space left" in line}
    assert sentences == {
        f"postroom: cannot use the state directory {tmp_path}/state: No space left on device; free some space there",
        f"postroom: {tmp_path}/state/up.pid: No space left on device",
    }
