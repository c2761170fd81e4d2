"""What `postroom up` says once everything runs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from cli.stack import Layout
from cli.up import explain


def test_the_line_to_copy_works_in_a_directory_with_a_space(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = Layout(tmp_path / "mail room")
    layout.state.mkdir()
    layout.env_file.write_text("POSTROOM_MESH=demo\n")
    explain(layout)
    (to_copy,) = (line for line in capsys.readouterr().out.splitlines() if "set -a" in line)
    command = to_copy.removesuffix("tell this shell where it is")
    shell = subprocess.run(["sh", "-c", f"{command}; echo $POSTROOM_MESH"], capture_output=True, text=True, check=True)
    assert shell.stdout == "demo\n"
