"""Durations, times and rates as people write them on a command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Final

import typer

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[smhdw])+")
_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")
_RATE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:/s)?")
_MOST_SECONDS: Final = 100 * 365.25 * 86400  # beyond a hundred years it is a slip of the pen


def duration(text: str) -> float:
    """Read `90s`, `1h30m`, `7d` as seconds."""
    if _DURATION.fullmatch(text) is None:
        raise typer.BadParameter(f"{text!r} is not a duration: write 90s, 15m, 1h30m, 7d or 2w")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if seconds > _MOST_SECONDS:
        raise typer.BadParameter(f"{text!r} is longer than 100 years")
    return seconds


def time_of(text: str) -> datetime | None:
    """Read an RFC 3339 time, or a date, with its offset where it has one; None for anything else."""
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def moment(text: str) -> datetime:
    """Read a moment that is over: a time, in UTC unless it has an offset, or how long ago it was, as `duration`."""
    now = datetime.now(UTC)
    found = time_of(text)
    if found is None:
        if _DURATION.fullmatch(text) is None:
            raise typer.BadParameter(
                f"{text!r} is neither a time, as in 2026-01-31T12:00:00Z, nor how long ago it was, as in 90s, 1h30m, 7d"
            )
        return now - timedelta(seconds=duration(text))
    try:
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is out of range") from None
    if found > now:
        raise typer.BadParameter(f"{text!r} is in the future")
    return found


def age(text: str) -> float:
    """Read the same as the seconds that have passed since."""
    return (datetime.now(UTC) - moment(text)).total_seconds() if time_of(text) else duration(text)


def rate(text: str) -> float:
    """Read `50/s` or `50` as messages a second."""
    match = _RATE.fullmatch(text)
    if match is None or not 0 < float(match[1]) < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a rate: write 50/s or 0.5/s")
    return float(match[1])
