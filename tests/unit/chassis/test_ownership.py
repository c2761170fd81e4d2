"""Whose files and directories are, whoever makes them and under whatever umask."""

import os
from pathlib import Path

import pytest

from chassis.ownership import hand_over, private_directory


def test_a_file_is_given_to_the_owner_of_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, 65534, 65534)
    with (directory / "file").open("w") as file:
        hand_over(file.fileno(), directory)
    owner, given = directory.stat(), (directory / "file").stat()
    assert (given.st_uid, given.st_gid) == (owner.st_uid, owner.st_gid)


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
