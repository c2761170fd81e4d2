"""`postroom drill restore`: what an older Postgres and an older outbox lack comes back, by the documented commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from embedded.processes import tethered

ROOT = Path(__file__).parents[2]


def test_every_number_of_the_drill_holds_and_nothing_is_left(short_directory: Path) -> None:
    ran = subprocess.run(
        tethered([sys.executable, "-m", "cli", "drill", "restore"]),
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(short_directory)},
        check=False,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    rows = re.findall(r"^(\w[\w ]+?)  .* ([\d,]+)    (yes|NO)$", ran.stdout, re.MULTILINE)
    assert {what: (count, holds) for what, count, holds in rows} == {
        "sent": ("2,000", "yes"),
        "accepted": ("2,000", "yes"),
        "in its history": ("2,000", "yes"),
        "handled": ("2,000", "yes"),
        "recognised": ("400", "yes"),
        "called again": ("500", "yes"),
        "waiting": ("0", "yes"),
        "lost": ("0", "yes"),
    }
    typed = re.findall(r"^   \$ ((?:pg_\w+|postroom (?:outbox|broker) \w+) )", ran.stdout, re.MULTILINE)
    page = (ROOT / "docs/backup.md").read_text()
    assert len(typed) == 6
    assert [words for words in typed if f"$ {words}" not in page] == []
    assert list(short_directory.iterdir()) == []
