"""A user's own module, named on the command line and found in the current directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
from postroom.chassis.runtime import load_named
print(load_named("pricing:NAME", what="an agent", example="module:Agent"))
import postroom.worker  # what a program imports later is ours all the same
print(postroom.worker.__name__)
"""


def test_a_module_of_the_current_directory_is_found_and_its_neighbours_hide_none_of_ours(tmp_path: Path) -> None:
    (tmp_path / "pricing.py").write_text("import prices\nNAME = prices.NAME\n")
    (tmp_path / "prices.py").write_text("NAME = 'found'\n")
    (tmp_path / "worker.py").write_text("raise SystemExit('a file of the user')\n")
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["found", "postroom.worker"], done.stderr
