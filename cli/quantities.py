"""Durations and rates as people write them on a command line."""

from __future__ import annotations

import re
from typing import Final

import typer

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION: Final = re.compile(r"(?:\d+(?:\.\d+)?[smhdw])+")
_PART: Final = re.compile(r"(\d+(?:\.\d+)?)([smhdw])")
_RATE: Final = re.compile(r"(\d+(?:\.\d+)?)(?:/s)?")


def duration(text: str) -> float:
    """Read `90s`, `1h30m`, `7d` as seconds."""
    if _DURATION.fullmatch(text) is None:
        raise typer.BadParameter(f"{text!r} is no duration: write 90s, 15m, 1h30m, 7d or 2w")
    return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))


def rate(text: str) -> float:
    """Read `50/s` or `50` as messages a second."""
    match = _RATE.fullmatch(text)
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"{text!r} is no rate: write 50/s or 0.5/s")
    return float(match[1])
