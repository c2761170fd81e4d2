"""What a campaign says: a line as each goal ends, and the table in the end."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime

from faults.campaign import GOALS, Shown


def table(shown: Sequence[Shown], *, seconds: float, soak: bool, scale: float) -> str:
    """Return what was shown, as Markdown."""
    column = "make faults-soak" if soak else "make faults"
    of = "" if scale == 1 else f", {scale:g} of its size (which shows nothing)"
    machine = f"{os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    head = f"`{column}`{of}: {datetime.now(UTC):%Y-%m-%d}, {seconds / 60:.0f} minutes, {machine}, {_user()}.\n"
    names = "| goal | trials | seconds | seed | what struck | result | figures | control | at most |\n"
    return head + "\n" + names + "|---|---|---|---|---|---|---|---|---|\n" + "\n".join(map(_row, shown))


def replaced(rows: str, whole: str) -> str:
    """Return the table `whole` with `rows`, another table, in the places of its own rows of the same goals."""
    new = {row.split()[1]: row for row in rows.splitlines() if row.startswith("| F")}
    kept = [new.pop(row.split()[1], row) if row.startswith("| F") else row for row in whole.strip().splitlines()]
    return "\n".join([*kept, *new.values()])


def _row(shown: Shown) -> str:
    struck = ", ".join(f"{what}: {count:,}" for what, count in sorted(shown.struck.items())) or "-"
    bound = f"{3 / shown.trials:.2%}" if shown.held and shown.trials else "-"
    cells = [
        f"{shown.name} {GOALS[shown.name].title}",
        f"{shown.trials:,}",
        f"{shown.seconds:.0f}",
        str(shown.seed),
        struck,
    ]
    cells += [shown.result, "; ".join(shown.figures) or "-", shown.control, bound]
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def line(shown: Shown) -> str:
    again = "" if shown.held or shown.lacking else f"  again: python -m faults {shown.name} --seed {shown.seed}"
    figures = "; ".join([f"{what}: {count:,}" for what, count in sorted(shown.struck.items())] + shown.figures)
    return f"    {shown.seconds:5.0f} s  {shown.result}  ({figures})  control: {shown.control}{again}"


def _user() -> str:
    return "as root" if os.geteuid() == 0 else "as a plain user"
