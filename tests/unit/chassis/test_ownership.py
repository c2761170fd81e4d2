"""Whose files and directories are, whoever makes them and under whatever umask."""

import errno
import fcntl
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from postroom.chassis.listener import listening, unix_listener
from postroom.chassis.ownership import (
    check_private,
    create_private,
    hand_over,
    is_there,
    open_private,
    private_directory,
    refuse_link,
    replace_private,
)


def test_a_file_is_given_to_the_owner_of_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, 65534, 65534)
    with (directory / "file").open("w") as file:
        hand_over(file.fileno(), directory)
    owner, given = directory.stat(), (directory / "file").stat()
    assert (given.st_uid, given.st_gid) == (owner.st_uid, owner.st_gid)


def test_what_may_not_be_looked_at_is_not_said_to_be_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert is_there(tmp_path)
    assert not is_there(tmp_path / "absent")
    assert not is_there(tmp_path / "file" / "below")

    def refuse(path: Path, **_: object) -> None:  # root may look at everything
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(PermissionError):
        is_there(tmp_path / "file")


def test_a_private_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file, taken = tmp_path / "file", tmp_path / "taken"
    (tmp_path / "file.new").write_text("of a program that was killed half-way")
    (tmp_path / "file.new").chmod(0o600)
    taken.mkdir()
    for content in ("first", "ünd"):
        replace_private(file, content)
        assert (file.read_text("utf-8"), file.stat().st_mode & 0o777) == (content, 0o600)
    with pytest.raises(IsADirectoryError):
        replace_private(taken, "no file can be there")
    with pytest.raises(UnicodeEncodeError):
        replace_private(file, "half of a surrogate pair: \ud800")
    assert file.read_text("utf-8") == "ünd"
    assert {each.name for each in tmp_path.iterdir()} == {"file", "taken"}


def test_who_replace_a_private_file_at_once_all_succeed(tmp_path: Path) -> None:
    file, contents = tmp_path / "file", [f"{number}" * 1000 for number in range(10)] * 20
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda content: replace_private(file, content), contents))
    assert file.read_text("utf-8") in contents
    assert [*tmp_path.iterdir()] == [file]


@pytest.mark.parametrize(("umask", "parent_mode"), [(0o000, 0o755), (0o022, 0o755), (0o077, 0o700)])
def test_a_private_directory_lies_where_nobody_else_writes(tmp_path: Path, umask: int, parent_mode: int) -> None:
    directory = tmp_path / "a" / "b" / "c"
    before = os.umask(umask)
    try:
        private_directory(directory)
        private_directory(directory)
    finally:
        os.umask(before)
    modes = [each.stat().st_mode & 0o777 for each in (directory.parent.parent, directory.parent, directory)]
    assert modes == [parent_mode, parent_mode, 0o700]


def test_a_private_directory_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    private_directory(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o711


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o703])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(OSError, match=r"others may write to it: chmod go-w .*"):
        private_directory(tmp_path)


def test_a_directory_below_one_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match=f"others may write to the directory {tmp_path} above it"):
        private_directory(tmp_path / "state")
    tmp_path.chmod(0o1777)
    private_directory(tmp_path / "state")


@pytest.mark.parametrize("below", ["state", "some/where/state"])
def test_where_a_directory_is_refused_none_is_made(tmp_path: Path, below: str) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="others may write to the directory"):
        private_directory(tmp_path / below)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["link", "link/state"])
def test_a_link_that_leads_nowhere_is_refused_as_one(tmp_path: Path, below: str) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(OSError, match=f"{tmp_path}/link is a link to {tmp_path}/gone, which is not there: remove it"):
        private_directory(tmp_path / below)
    assert not (tmp_path / "gone").exists()


def test_a_link_to_a_directory_counts_by_where_it_lies_too(tmp_path: Path) -> None:
    (open_to_all := tmp_path / "open").mkdir()
    private_directory(tmp_path / "state")
    (open_to_all / "link").symlink_to(tmp_path / "state")
    private_directory(open_to_all / "link")
    open_to_all.chmod(0o777)
    with pytest.raises(OSError, match="others may write to"):
        private_directory(open_to_all / "link")


def test_a_group_may_write_to_a_directory_where_it_is_this_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o770)
    monkeypatch.setattr("postroom.chassis.ownership._is_private_group", lambda _: True)
    check_private(tmp_path)
    monkeypatch.setattr("postroom.chassis.ownership._is_private_group", lambda _: False)
    with pytest.raises(OSError, match="others may write"):
        check_private(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused_but_root_may_work_for_its_owner(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, -1)
    with pytest.raises(OSError, match=r"it belongs to \w+: give it to root"):
        private_directory(tmp_path)
    with pytest.raises(OSError, match=f"the directory {tmp_path} above it belongs to"):
        private_directory(tmp_path / "state")
    private_directory(tmp_path, may_be_anothers=True)


def test_a_file_is_opened_private_and_never_through_a_link(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        os.close(open_private(tmp_path / "new"))
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a symbolic link: remove it"):
        open_private(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a regular file: move it"):
        refuse_link(tmp_path / "pipe")


def test_a_file_is_created_without_being_opened_and_refused_as_if_it_had_been(tmp_path: Path) -> None:
    create_private(tmp_path / "new")
    (tmp_path / "new").write_text("kept")
    create_private(tmp_path / "new")
    assert (tmp_path / "new").read_text() == "kept"
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a symbolic link: remove it"):
        create_private(tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        create_private(tmp_path / "absent" / "new")


def test_a_file_that_this_user_may_not_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch(mode=0o444)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    if (child := os.fork()) == 0:
        number = 0
        try:
            if os.geteuid() == 0:  # who may write everything
                os.setuid(65534)
            create_private(Path("file"))
        except OSError as error:
            number = error.errno or 0
        finally:
            os._exit(number)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EACCES


def test_programs_that_start_at_once_in_one_directory_all_listen(short_directory: Path) -> None:
    with ThreadPoolExecutor(8) as starters:
        sockets = list(starters.map(lambda number: unix_listener(short_directory / f"{number}.sock"), range(8)))
    assert all((short_directory / f"{number}.sock").is_socket() for number in range(8))
    for sock in sockets:
        sock.close()


def test_who_keeps_the_directory_locked_keeps_nobody_from_listening(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.chassis.listener._LONGEST_WAIT", 0.05)
    held = os.open(short_directory, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    unix_listener(short_directory / "s.sock").close()
    os.close(held)


async def test_a_process_that_users_code_has_forked_keeps_no_port() -> None:
    killed, next_one = web.AppRunner(web.Application()), web.AppRunner(web.Application())
    await killed.setup()
    await next_one.setup()
    port = urlsplit(await listening(killed, "127.0.0.1", 0)).port or 0
    forked, said = os.pipe()
    if (child := os.fork()) == 0:
        os.write(said, b"!")
        signal.pause()
    try:
        os.read(forked, 1)
        await killed.cleanup()
        assert urlsplit(await listening(next_one, "127.0.0.1", port)).port == port
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)  # noqa: ASYNC222 - it is killed
        os.close(forked)
        os.close(said)
        await killed.cleanup()
        await next_one.cleanup()
