"""The demo where it cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli import main
from postroom.chassis.exits import Exit


def test_without_the_source_tree_the_demo_says_where_it_can_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cli.demo.EVENTS", tmp_path / "events.ndjson")
    assert main.run(["demo", "--state", str(tmp_path / "new")]) == Exit.UNAVAILABLE
    said = capsys.readouterr().err
    assert "make demo" in said
    assert str(tmp_path) in said
    assert not (tmp_path / "new").exists()
