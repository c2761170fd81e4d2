"""Unix sockets below directories of any length."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embedded import EmbeddedError
from embedded.server import MAX_ADDRESS_BYTES, socket_directory


@pytest.fixture(autouse=True)
def _own_temporary_directory(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_directory))


def test_a_directory_that_fits_is_used_itself(short_directory: Path) -> None:
    name = "s" * (MAX_ADDRESS_BYTES - len(str(short_directory)) - 1)
    assert socket_directory(short_directory, name) == short_directory


def test_one_byte_more_gets_a_short_stand_in_that_stays_the_same(short_directory: Path) -> None:
    long = short_directory / ("d" * (MAX_ADDRESS_BYTES - len(str(short_directory)) - 2))
    stand_in = socket_directory(long, "s")
    assert stand_in.stat().st_mode & 0o777 == 0o700
    assert len(str(stand_in / "s")) <= MAX_ADDRESS_BYTES
    assert socket_directory(long, "s") == stand_in
    assert socket_directory(long.with_name(long.name + "e"), "s") != stand_in


def test_a_link_in_the_place_of_the_stand_in_is_refused(short_directory: Path) -> None:
    long = short_directory / ("d" * MAX_ADDRESS_BYTES)
    stand_in = socket_directory(long, "s")
    stand_in.rmdir()
    stand_in.symlink_to(short_directory)
    with pytest.raises(EmbeddedError, match="belongs to another user"):
        socket_directory(long, "s")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_stand_in_of_another_user_is_refused(short_directory: Path) -> None:
    long = short_directory / ("d" * MAX_ADDRESS_BYTES)
    os.chown(socket_directory(long, "s"), 12345, -1)
    with pytest.raises(EmbeddedError, match="belongs to another user"):
        socket_directory(long, "s")


def test_no_short_place_at_all_is_an_error_that_names_the_directory(short_directory: Path) -> None:
    with pytest.raises(EmbeddedError, match="choose a shorter one"):
        socket_directory(short_directory / "d", "s" * MAX_ADDRESS_BYTES)
