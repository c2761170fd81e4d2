"""The example applications: their own tests pass, with what users install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED = ROOT / ".venv" / "examples"


@pytest.mark.parametrize("name", ["django", "fastapi"])
def test_the_tests_of_an_example_pass(name: str, tmp_path: Path) -> None:
    assert INSTALLED.exists(), "`make .venv/examples` installs what the examples are written with"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    environment = {**os.environ, "PYTHONPATH": str(INSTALLED), "PYTHONDONTWRITEBYTECODE": "1", "HOME": str(tmp_path)}
    ran = subprocess.run(
        [*command, "--rootdir", "."],
        cwd=ROOT / "examples" / name,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
