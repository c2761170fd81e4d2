"""Showing what a check found, and ending with exit code 1 where something failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cli.output import json_line, table
from postroom.chassis.exits import Exit

if TYPE_CHECKING:
    from postroom.chassis.exits import Finding


def show_findings(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Print every finding; raises `SystemExit` (1) where one of them is `failed`."""
    if as_json:
        for finding in findings:
            json_line(finding)
    else:
        table(("", "WHAT", "FOUND", "WHAT TO DO"), ((f.verdict, f.subject, f.detail, f.remedy) for f in findings))
    if any(finding.verdict == "failed" for finding in findings):
        raise SystemExit(Exit.FAILED)
