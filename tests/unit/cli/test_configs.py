"""The daemon's config where nobody named it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli import main
from postroom.chassis.exits import Exit

VERBS = [("daemon", "check"), ("daemon", "run"), ("daemon", "rotate-token"), ("outbox", "recover", "--yes")]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_where_up_has_written_one_the_refusal_says_where(
    verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POSTROOM_STATE", str(tmp_path))
    assert main.run(list(verb)) == Exit.CONFIG
    assert str(tmp_path) not in capsys.readouterr().err

    written = tmp_path / "daemon" / "daemon.toml"
    written.parent.mkdir()
    written.touch()
    assert main.run(list(verb)) == Exit.CONFIG
    said = capsys.readouterr().err
    assert "--config FILE" in said
    assert str(written) in said
