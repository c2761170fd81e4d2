"""What root writes for a daemon belongs to the daemon; anybody else writes what is theirs anyway."""

import os
from pathlib import Path

from chassis.ownership import hand_over


def test_a_file_is_given_to_the_owner_of_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    directory.mkdir()
    if os.geteuid() == 0:
        os.chown(directory, 65534, 65534)
    with (directory / "file").open("w") as file:
        hand_over(file.fileno(), directory)
    owner, given = directory.stat(), (directory / "file").stat()
    assert (given.st_uid, given.st_gid) == (owner.st_uid, owner.st_gid)
